"""Writes a checkpoint: each rank its own file, and rank 0, when all are on the disk, the manifest that makes it count.

Ranks tell each other how far they are by files in the checkpoint's folder, so that writing needs no collective call and
can go on beside training.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.folder import begun_file, complete, sync
from paceline.checkpoint.manifest import FORMAT, Manifest, Part, Stored, merged
from paceline.checkpoint.rank_file import checksums, file_name, write_rank_file
from paceline.core.errors import UserError

_POLL_SECONDS = 0.02


@dataclass
class OwnPart:
    """What one rank writes.

    Attributes:
        rank: Which.
        tensors: (first element, elements) by name: on the CPU, nobody else writes to them meanwhile.
        kinds: Dtype and whole shape of each.
        values: What it has of its own, encoded.
        token: The same for all parts of one save, and for no other: a job that was taken for lost, and goes on when
            another one has begun to save the same step, has another.
    """

    rank: int
    tensors: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    kinds: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    token: str = ""

    def add(self, name: str, start: int, elements: Tensor, shape: tuple[int, ...]) -> None:
        """Takes a range of a tensor of some whole shape, which may be empty."""
        self.kinds[name] = (str(elements.dtype).removeprefix("torch."), shape)
        self.tensors[name] = (start, elements)


def write_part(folder: Path, part: OwnPart) -> list[Path]:
    """Writes one rank's file, then what is in it; or why that could not be, which is raised too. Returns both files."""
    try:
        present = {name: (start, values) for name, (start, values) in part.tensors.items() if values.numel()}
        file = file_name(part.rank)
        # Before they are written: what goes wrong on the way to the disk must show.
        sums = {name: checksums(values) for name, (_, values) in present.items()}
        write_rank_file(folder / file, {name: values for name, (_, values) in present.items()})
        stored = {}
        for name, (dtype, shape) in part.kinds.items():
            parts: tuple[Part, ...] = ()
            if name in present:
                start, values = present[name]
                parts = (Part(file, start, start + values.numel(), sums[name]),)
            stored[name] = Stored(dtype, shape, parts)
        contents = {"token": part.token, "tensors": msgspec.to_builtins(stored), "values": part.values}
        _write(_index(folder, part.rank), contents)
        return [folder / file, _index(folder, part.rank)]
    except Exception as error:
        # A disk that is full may have no room for that either.
        with contextlib.suppress(OSError):
            _write(_failed(folder, part.rank), getattr(error, "strerror", None) or str(error) or repr(error))
        raise


def commit(
    folder: Path,
    step: int,
    ranks: int,
    strategy: dict[str, Any],
    patience: float,
    hopeless: Callable[[], bool] = lambda: False,
    token: str = "",
) -> Path:
    """On rank 0: waits until every rank has written its part, then makes the checkpoint count by a file of its own.

    Args:
        folder: The checkpoint's.
        step: See `Manifest`.
        ranks: How many write.
        strategy: How they share the work.
        patience: Seconds without a sign of a part being written after which it is given up.
        hopeless: Whether nobody is left who could write.
        token: Of this save's parts.

    Returns:
        That file.

    Raises:
        UserError: A rank could not write its part, or is not heard of, or another job saves there.
        OSError: This rank could not write the manifest.
    """
    contents = [_when_there(folder, rank, patience, hopeless) for rank in range(ranks)]
    # Looked at again: one that was frozen meanwhile would else complete what another one has begun anew.
    if any(_token_of(folder, rank) != token for rank in range(ranks)):
        raise UserError(f"another job saves to {folder}: this one was taken for lost, and is to end")
    own = [dict(each["values"]) for each in contents]
    common = own[0].pop("common")
    common["optimizers"] = _first_of_all([each.pop("optimizers") for each in own])
    tensors = merged(msgspec.convert(each["tensors"], dict[str, Stored]) for each in contents)
    manifest = Manifest(
        format=FORMAT,
        step=step,
        world_size=ranks,
        strategy=strategy,
        versions=versions(),
        tensors=tensors,
        values=common,
        ranks=tuple(own),
    )
    found = complete(folder, manifest)
    for rank in range(ranks):
        _index(folder, rank).unlink(missing_ok=True)
    begun_file(folder, token).unlink(missing_ok=True)
    return found


def versions() -> dict[str, str]:
    """Versions of what writes a checkpoint."""
    from paceline import __version__

    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def _when_there(folder: Path, rank: int, patience: float, hopeless: Callable[[], bool]) -> dict[str, Any]:
    """What a rank has written, once it has."""
    index, failed, file = _index(folder, rank), _failed(folder, rank), folder / file_name(rank)
    seen, since = -1, time.monotonic()
    while not index.exists():
        if failed.exists():
            raise UserError(f"rank {rank} could not write its part: {json.loads(failed.read_bytes())}")
        size = file.stat().st_size if file.exists() else 0
        if size != seen:
            seen, since = size, time.monotonic()
        if time.monotonic() - since > patience or hopeless():
            raise UserError(
                f"rank {rank}'s part is not there: the folder must be one that all ranks share, and the rank alive"
            )
        time.sleep(_POLL_SECONDS)
    contents: dict[str, Any] = json.loads(index.read_bytes())
    return contents


def _token_of(folder: Path, rank: int) -> str | None:
    try:
        found: str = json.loads(_index(folder, rank).read_bytes())["token"]
    except FileNotFoundError:
        return None
    return found


def _first_of_all(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Optimizers as rank 0 has them, with the states of parameters that only other ranks have."""
    for optimizers in ranks[1:]:
        for mine, theirs in zip(ranks[0], optimizers, strict=True):
            mine["states"] = {**theirs["states"], **mine["states"]}
    return ranks[0]


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)


def _index(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _failed(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failed"
