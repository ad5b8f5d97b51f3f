"""Weights on disk, read one tensor at a time: safetensors under a model's own names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import UserError

_INDEX = ".safetensors.index.json"
"""How the file ends that says, as Hugging Face writes it, which file of a folder holds which tensor."""
_NAMED_AT_MOST = 5


class StoredWeights:
    """The tensors of a safetensors file, or of a folder of them, by name. Only headers are read until one is asked for.

    Attributes:
        shapes: By name.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the headers.

        Raises:
            UserError: There are no such files, they are damaged, or two hold the same name.
        """
        self._path = Path(path)
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(self._path):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118
                if name in self._file_of:
                    raise UserError(
                        f"weights: {name} is in {self._file_of[name]} and in {file}: name one file, or a folder with "
                        f"one model or an index (*{_INDEX})"
                    )
                self._file_of[name] = file
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"weights: {file} cannot be read as safetensors ({error}): use another copy of it"
                ) from error
        return self._files[file]

    def require_fit(self, wanted: Iterable[tuple[Sequence[str], tuple[int, ...]]]) -> None:
        """Compares with what a model needs.

        Args:
            wanted: Of each tensor its names and its shape. Tied parameters have several names, of which one in the
                files is enough.

        Raises:
            UserError: Names are missing or not the model's, or shapes differ; says which.
        """
        wanted = list(wanted)
        known = {name for names, _ in wanted for name in names}
        missing = [names[0] for names, _ in wanted if self.shapes.keys().isdisjoint(names)]
        unexpected = [name for name in self.shapes if name not in known]
        differ = [
            f"{name} ({list(self.shapes[name])} in the file, {list(shape)} in the model)"
            for names, shape in wanted
            for name in names
            if self.shapes.get(name, shape) != shape
        ]
        found = {"missing": missing, "not in the model": unexpected, "of another shape": differ}
        if any(found.values()):
            said = "; ".join(f"{what}: {_listed(names)}" for what, names in found.items() if names)
            raise UserError(
                f"weights: {self._path} does not fit the model; {said}. Give the weights of this model, under the "
                "names of its state_dict"
            )

    def read_into(self, tensor: Tensor, names: Sequence[str]) -> None:
        """Copies a tensor from the file, cast to the dtype that it has in the model.

        Raises:
            UserError: The file cannot be read.
        """
        tensor.copy_(self.read(next(name for name in names if name in self._file_of)))

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, on the CPU.

        Raises:
            UserError: The file cannot be read.
        """
        try:
            tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"weights: {name} cannot be read from {self._file_of[name]} ({error})") from error
        return tensor

    def dtype(self, name: str) -> str:
        """A tensor's dtype as the format spells it, such as BF16."""
        dtype: str = self._open(self._file_of[name]).get_slice(name).get_dtype()
        return dtype


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    indices = sorted(path.glob(f"*{_INDEX}"))
    if len(indices) == 1:
        try:
            names = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"weights: {indices[0]} is no index of safetensors files ({error!r})") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise UserError(
                    f"weights: {indices[0]} names {name!r}, which is no file beside it: use another copy of the folder"
                )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"weights: there is no safetensors file at {path}: give one, or a folder that holds some")
    return files


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
