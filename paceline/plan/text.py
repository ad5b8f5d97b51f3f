"""Tables and counts on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, word: str, plural: str = "s") -> str:
    """A number of things in words, such as "8 devices"."""
    return f"{number:,} {word}{plural if number != 1 else ''}"


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Prints a table whose first `left` columns begin where their heads do, and whose others end there."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    for cells in (heads, *rows):
        places = zip(cells, widths, strict=True)
        line = "  ".join(
            f"{cell:<{width}}" if index < left else f"{cell:>{width}}" for index, (cell, width) in enumerate(places)
        )
        print(line.rstrip())
