"""Files of JSON lines, read as far as they can be: a run may end anywhere, also in the middle of a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

_LONGEST = 1 << 16
"""Bytes: what is longer is no line that a run wrote."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line(Generic[T]):
    """A line that could be read: its value, and which bytes of the file it is."""

    value: T
    start: int
    stop: int


@dataclass
class Damage:
    """What could not be read of a file.

    Attributes:
        lines: How many lines are not what was expected.
        is_cut: Whether the file ends in the middle of a line.
    """

    lines: int = 0
    is_cut: bool = False

    def describe(self, name: str) -> list[str]:
        """A sentence for each thing that is wrong."""
        cut = (
            f"{name} ends in the middle of a line, which is left out: the run was cut off, or was writing it just then."
        )
        many = f"{self.lines:,} lines of {name} are" if self.lines > 1 else f"A line of {name} is"
        return [
            *([f"{many} not what a run writes, and left out."] if self.lines else []),
            *([cut] if self.is_cut else []),
        ]


def read_lines(
    path: Path, decoder: msgspec.json.Decoder[T], damage: Damage, start: int = 0, stop: int | None = None
) -> Iterator[Line[T]]:
    """The lines of a file that are what is expected.

    Args:
        path: The file; none is an empty one.
        decoder: Knows what is expected.
        damage: Counts what is not.
        start: The first byte to read; in the middle of a line, the rest of that is left out.
        stop: The first byte not to read.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        end = file.seek(start)
        if start and file.seek(start - 1) is not None and file.read(1) != b"\n":
            end += len(file.readline())
        while (stop is None or end < stop) and (data := file.readline(_LONGEST)):
            start, end = end, end + len(data)
            try:
                value = decoder.decode(data)
            except (ValueError, RecursionError):
                if data.strip():
                    damage.is_cut = not data.endswith(b"\n") and len(data) < _LONGEST
                    damage.lines += not damage.is_cut
            else:
                yield Line(value, start, end)
