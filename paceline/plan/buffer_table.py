"""The schedule's table of buffers, as a plan shows it: what each takes, and between which ops it is needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.command_line import quantities as said
from paceline.core.check.report import BufferUse, uses
from paceline.core.schedule import Schedule

HEADS = ("buffer", "for", "dtype", "first written by", "last read by", "size")
_SHOWN = 12
"""The largest ones, of which a page has room for."""
_ALIKE = 2
"""Micro-batches after which a step's ops use the buffers as before."""


def buffers(schedule: Schedule, micro_batches: int) -> tuple[BufferUse, ...]:
    """What each buffer of a rank is, with the ops of a step that use it; of several micro-batches two stand for all."""
    count = min(micro_batches, _ALIKE)
    return uses(schedule.buffers(count), schedule.step(count))


def rows(table: Sequence[BufferUse]) -> list[tuple[str, ...]]:
    """The cells of the largest buffers, and of all others together."""
    largest = sorted((each for each in table if each.bytes), key=lambda each: -each.bytes)
    shown: list[tuple[str, ...]] = [
        (each.name, each.kind, each.dtype, _op(each.written), _op(each.read), said.size(each.bytes))
        for each in largest[:_SHOWN]
    ]
    if rest := largest[_SHOWN:]:
        shown.append((f"{len(rest)} smaller", "", "", "", "", said.size(sum(each.bytes for each in rest))))
    return shown


def _op(words: str | None) -> str:
    """An op without its micro-batch, which stands for others."""
    return "-" if words is None else words.rpartition(" (")[0]
