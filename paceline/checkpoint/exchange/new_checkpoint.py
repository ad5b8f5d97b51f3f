"""A checkpoint made of tensors that come from elsewhere, as one rank would have saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.exchange.tensor_file import Lazy, write_tensors
from paceline.checkpoint.folder import complete, discard, make_folder
from paceline.checkpoint.manifest import FORMAT, Manifest, Part, Stored
from paceline.checkpoint.rank_file import checksums, file_name
from paceline.checkpoint.writing import versions
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy


def write_checkpoint(
    path: Path,
    tensors: Sequence[Lazy],
    optimizers: Sequence[dict[str, Any]],
    schedulers: Sequence[Any],
    extra: Any,
    step: int,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a checkpoint that `load` takes at any stage, one tensor after another.

    Args:
        path: Its folder, which must be new.
        tensors: Under the names that a checkpoint gives them.
        optimizers: As `OptimizerStates.values` gives them.
        schedulers: Their states, encoded.
        extra: What `load` returns, encoded.
        step: How many steps were done.
        beside: Other files of the folder, by name.

    Raises:
        UserError: The folder is not new, or cannot be written to.
    """
    make_folder(path)
    sums: dict[str, tuple[int, ...]] = {}

    def flat(tensor: Lazy) -> Lazy:
        def read() -> Tensor:
            elements = tensor.read().reshape(-1)
            sums[tensor.name] = checksums(elements)
            return elements

        return replace(tensor, shape=(tensor.nbytes // tensor.dtype.itemsize,), read=read)

    try:
        write_tensors(path / file_name(0), [flat(tensor) for tensor in tensors if tensor.nbytes])
        for name, data in (beside or {}).items():
            (path / name).write_bytes(data)
        complete(
            path,
            Manifest(
                format=FORMAT,
                step=step,
                world_size=1,
                strategy=asdict(Strategy()),
                versions=versions(),
                tensors={tensor.name: _stored(tensor, sums.get(tensor.name)) for tensor in tensors},
                values={"optimizers": list(optimizers), "schedulers": list(schedulers), "extra": extra, "modules": {}},
                ranks=({"random": None, "loader": None},),
            ),
        )
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}; name a folder on another disk"
        ) from error
    finally:
        discard(path)


def _stored(tensor: Lazy, sums: tuple[int, ...] | None) -> Stored:
    parts = () if sums is None else (Part(file_name(0), 0, tensor.nbytes // tensor.dtype.itemsize, sums),)
    return Stored(str(tensor.dtype).removeprefix("torch."), tensor.shape, parts)
