"""Reads a CSV of measurements: whatever its columns are called, with their line numbers, and nothing dropped."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.plan.published.columns import resolve

_MISSING = frozenset({"", "-", "—", "na", "n/a", "nan", "null", "not stated", "unknown", "?"})
_LARGEST = 10**9
"""Of any whole number of a run: what is more is a slip."""
_TRUE = frozenset({"true", "yes", "on", "1", "y", "full", "x"})
_FALSE = frozenset({"false", "no", "off", "0", "n", "none"})


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        line: Its number in the file.
        values: Cells by what they are (a key of `columns.SYNONYMS`), empty ones left out.
        scales: What numbers of a column are multiplied by to be in seconds, bytes, shares or parameters.
        raw: Cells by the file's own names of its columns.
        called: The file's own names of columns by what they are.
        fault: What is wrong with the line itself, if anything.
    """

    line: int
    values: Mapping[str, str]
    scales: Mapping[str, float]
    raw: Mapping[str, str] = field(repr=False)
    called: Mapping[str, str] = field(repr=False)
    fault: str = ""

    def text(self, name: str) -> str:
        """A cell in lower case; "" where there is none."""
        return self.values.get(name, "").lower()

    def number(self, name: str) -> float | None:
        """A cell's number; None where there is none.

        Raises:
            UserError: There is something else.
        """
        if name not in self.values:
            return None
        text = self.values[name].replace("_", "").strip().rstrip("%x").strip()
        # Of thousands: elsewhere it may stand for a point.
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
        scale = self.scales[name]
        if name == "n_params" and text[-1:].lower() in ("m", "b", "t"):
            scale = {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1].lower()]
            text = text[:-1]
        try:
            value = float(text)
        except ValueError:
            raise UserError(f"{self.called[name]}: expected a number, got {self.values[name]!r}") from None
        if not math.isfinite(value):
            raise UserError(f"{self.called[name]}: expected a finite number, got {self.values[name]!r}")
        return value * scale

    def whole(self, name: str) -> int | None:
        """A cell's whole number, at least 1; None where there is none.

        Raises:
            UserError: There is something else.
        """
        value = self.number(name)
        if value is not None and (not 1 <= value <= _LARGEST or value != int(value)):
            raise UserError(
                f"{self.called[name]}: expected a whole number from 1 to {_LARGEST:,}, got {self.values[name]!r}"
            )
        return None if value is None else int(value)

    def flag(self, name: str) -> bool | None:
        """Whether a cell says yes; None where it says nothing of the kind."""
        text = self.text(name)
        return True if text in _TRUE else False if text in _FALSE else None


@dataclass(frozen=True)
class Table:
    """All of a file.

    Attributes:
        path: Where it is from.
        rows: One for each line, whatever is in it.
        unknown: The file's names of columns that nothing here knows; their cells are in `Row.raw`.
    """

    path: Path
    rows: tuple[Row, ...]
    unknown: tuple[str, ...]


def read(path: str | Path) -> Table:
    """Reads a CSV whose first line names its columns.

    Raises:
        UserError: There is no such file, it is no text, it has no lines, or a column twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: expected a CSV file of measurements, found no file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: expected a CSV file of measurements, got a folder") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected a CSV file in UTF-8, got byte {error.start} that is not") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        lines = csv.reader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        header = next(lines, [])
        if not any(cell.strip() for cell in header):
            raise UserError(f"{path}: expected a first line that names the columns, got an empty one")
        if len(header) == 1 and (other := next((each for each in ";\t|" if each in header[0]), "")):
            raise UserError(f"{path}: expected commas between columns, or tabs in a .tsv file, got {other!r}")
        if twice := [name for name, count in Counter(map(str.strip, header)).items() if name and count > 1]:
            raise UserError(f"{path}: expected each column once, got {twice[0]!r} twice")
        columns = [resolve(cell) for cell in header]
        rows, last = [], lines.line_num
        for cells in lines:
            # A cell in quotes may go over several lines.
            first, last = last + 1, lines.line_num
            if any(map(str.strip, cells)):
                rows.append(_row(first, header, columns, cells))
    except csv.Error as error:
        raise UserError(f"{path}: expected a CSV file, got what is none: {error}") from None
    if not rows:
        raise UserError(f"{path}: expected measurements below the names of the columns, got none")
    unknown = tuple(name for name, column in zip(header, columns, strict=True) if column is None)
    return Table(path, tuple(rows), unknown)


def _row(line: int, header: list[str], columns: list[tuple[str, float] | None], cells: list[str]) -> Row:
    raw = dict(zip(header, cells, strict=False))
    values: dict[str, str] = {}
    scales: dict[str, float] = {}
    called: dict[str, str] = {}
    for title, column, cell in zip(header, columns, cells, strict=False):
        if column is None or cell.strip().lower() in _MISSING:
            continue
        name, scale = column
        # Of several columns of one thing, such as a count and its check, the first counts.
        if name not in values:
            values[name], scales[name], called[name] = cell.strip(), scale, title.strip()
    fault = ""
    if len(cells) != len(header):
        fault = f"expected {len(header)} cells as in the first line, got {len(cells)}"
    return Row(line, values, scales, raw, called, fault)
