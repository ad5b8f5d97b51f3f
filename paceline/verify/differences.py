"""What is compared, in the order in which a step goes wrong, and where the first difference was seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["weights", "output", "loss", "local", "copied in", "reduced", "gradient", "norm", "updated"]

KINDS: dict[Kind, str] = {
    "weights": "a parameter as its unit computes with it in forward",
    "output": "what a unit's forward gives",
    "loss": "the loss of a micro-batch",
    "local": "a parameter's gradient as this rank's own backward gives it",
    "copied in": "a parameter's gradient as it lies in the bucket that is reduced",
    "reduced": "a parameter's gradient in a reduced shard, before replicas of the shard are reduced",
    "gradient": "a parameter's reduced gradient, before the update",
    "norm": "the norm of all reduced gradients",
    "updated": "a parameter after the update, or this rank's shard of it",
}
"""What is compared within a micro-batch and then at the end of a step; each can only be wrong by itself if all before
it are right."""

INSPECTED: tuple[Kind, ...] = ("output", "local", "copied in", "reduced")
"""Compared only when a step is run a second time to find out where a difference comes from."""


@dataclass(frozen=True)
class Difference:
    """One quantity that is not what one process has."""

    kind: Kind
    step: int
    micro_batch: int
    rank: int
    size: float
    """Relative; infinite where one side has no value, or another shape."""
    sequence: int
    """Counts the comparisons of one rank: which of several parameters was met first."""
    parameter: str = ""
    unit: str = ""
    bucket: str = ""
    op: str = ""
    """Kind of the op that gave the quantity, as in the schedule."""

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sorts by what comes first in training: causes before what follows from them, over all ranks."""
        return self.step, self.micro_batch, list(KINDS).index(self.kind), self.sequence, self.rank


@dataclass(frozen=True)
class Report:
    """What one rank, or all of them, found in one run."""

    largest: dict[Kind, float] = field(default_factory=dict)
    """Largest relative difference of each kind."""
    first: Difference | None = None
    """The first that is larger than the tolerance."""


def merge_reports(reports: list[Report]) -> Report:
    """The findings of all ranks as one."""
    kinds = [kind for kind in KINDS if any(kind in report.largest for report in reports)]
    largest = {kind: max(report.largest.get(kind, 0.0) for report in reports) for kind in kinds}
    firsts = [report.first for report in reports if report.first is not None]
    return Report(largest, min(firsts, key=lambda difference: difference.order, default=None))


class Recorder:
    """Takes down the comparisons of one rank.

    Attributes:
        step: Step under way, to be set.
        micro_batch: Micro-batch under way, to be set.
    """

    def __init__(self, rank: int, tolerance: float) -> None:
        self.step = self.micro_batch = 0
        self._rank, self._tolerance = rank, tolerance
        self._largest: dict[Kind, float] = {}
        self._first: Difference | None = None
        self._sequence = 0

    def record(
        self, kind: Kind, size: float, parameter: str = "", unit: str = "", bucket: str = "", op: str = ""
    ) -> None:
        """Takes down one comparison, equal or not."""
        self._largest[kind] = max(size, self._largest.get(kind, 0.0))
        self._sequence += 1
        if size > self._tolerance:
            found = Difference(
                kind, self.step, self.micro_batch, self._rank, size, self._sequence, parameter, unit, bucket, op
            )
            if self._first is None or found.order < self._first.order:
                self._first = found

    def report(self) -> Report:
        """What was found."""
        return Report(self._largest, self._first)
