"""Files that some ranks have written to their host's own folder, copied to the other hosts'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.comm.control import broadcast
from paceline.comm.world import World

_PIECE = 16 << 20
"""Bytes that are sent, and held, at once."""


def hand_on(folder: Path, files: Sequence[tuple[int, str, int]], world: World) -> str:
    """Copies files into a folder of the same path on every host. A collective call.

    Args:
        folder: Where they are on the hosts of those who wrote them. Where hosts share it, nothing is copied.
        files: Of each: the rank that wrote it, its name, its bytes. The same on every rank.
        world: The job.

    Returns:
        Why this rank could not read or write one; empty if it could.

    Raises:
        CommunicationError: A rank is gone.
    """
    problems = []
    for source, name, size in files:
        path, sends = folder / name, world.rank == source
        receives = not sends and world.local_rank == 0 and not path.exists()
        end = _End(path, "rb" if sends else "xb" if receives else "")
        buffer = torch.empty(min(size, _PIECE), dtype=torch.uint8, device="cpu")
        for start in range(0, size, _PIECE):
            piece = buffer[: min(_PIECE, size - start)]
            if sends:
                end.read(piece.numpy().data)
            # All take part in it, whatever became of the file on one.
            broadcast(piece, source, "what ranks hold in memory")
            if receives:
                end.write(piece.numpy().data)
        end.close()
        problems.append(end.problem)
    return next(filter(None, problems), "")


class _End:
    """A file that is sent or received, or none; what goes wrong with it is kept for later.

    Attributes:
        problem: What that is, in words; empty if nothing is.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self._path, self.problem = path, ""
        self._file: Any = None
        if mode:
            self._attempt(lambda: self._open(mode))

    def read(self, piece: memoryview) -> None:
        if not self.problem and self._attempt(lambda: self._file.readinto(piece)) != len(piece):
            self.problem = self.problem or f"{self._path} is shorter than it was"

    def write(self, piece: memoryview) -> None:
        if not self.problem:
            self._attempt(lambda: self._file.write(piece))

    def close(self) -> None:
        if self._file is not None:
            self._attempt(self._file.close)

    def _open(self, mode: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open(mode)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self.problem = self.problem or str(error)
