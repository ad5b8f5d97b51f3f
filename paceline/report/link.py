"""What collectives say of the links between ranks: a latency and a bandwidth, fitted to what they took. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from paceline.comm.profile import straight_line
from paceline.command_line import quantities as said
from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import alpha_beta_seconds
from paceline.report.meetings import Meeting
from paceline.report.steps import Step

_ALGORITHMS = {
    "all_reduce": "all_reduce/ring",
    "all_gather": "all_gather/ring",
    "reduce_scatter": "reduce_scatter/ring",
    "reduce": "reduce/server",
    "broadcast": "broadcast/server",
    "barrier": "barrier/doubling",
}
"""What each kind of collective is counted as: in all of them no rank has more to do than rank 0."""


COUNTED = frozenset(_ALGORITHMS)
"""Kinds of collective that a link is fitted to."""


@cache
def rounds_and_share(kind: str, ranks: int) -> tuple[int, float]:
    """In how many rounds a collective is done, and how much of its buffer a link carries in them one after another.

    A ring's all-reduce has 2 (N - 1) rounds and carries 2 (N - 1) / N of the buffer.
    """
    # Where nothing but a token is sent, that is the buffer; else a rank's chunk is one element.
    numel = 1 if kind == "barrier" else ranks
    first = find_algorithm(_ALGORITHMS[kind])(0, ranks, numel)
    rounds = alpha_beta_seconds(lambda *_: first, 1, numel, bandwidth=math.inf, latency=1.0)
    return round(rounds), alpha_beta_seconds(lambda *_: first, 1, numel, bandwidth=1.0) / numel


@dataclass(frozen=True)
class Link:
    """A link of each rank.

    Attributes:
        latency: Seconds a round.
        bandwidth: Bytes a second; infinite where larger collectives take no longer.
        samples: How many different collectives it is fitted to.
        typical_miss: By how much the middle one of them took more or less than it says, as a share of what it took.
        worst_miss: The same of the one that it says worst.
    """

    latency: float
    bandwidth: float
    samples: int
    typical_miss: float
    worst_miss: float

    @property
    def has_limit(self) -> bool:
        """Whether bytes cost anything."""
        return math.isfinite(self.bandwidth)

    @property
    def is_exact(self) -> bool:
        """Whether it goes through all that it is fitted to, as a line does through any two points."""
        return self.samples == 2 and self.worst_miss < 1e-6

    @property
    def in_words(self) -> str:
        """Its bandwidth."""
        return said.rate(self.bandwidth) if self.has_limit else "more than can be told"

    def seconds(self, kind: str, ranks: int, size: float) -> float:
        """What a collective over a buffer of `size` bytes takes."""
        rounds, share = rounds_and_share(kind, ranks)
        return self.latency * rounds + size * share / self.bandwidth


def fitted_link(steps: Iterable[Step]) -> Link | None:
    """The link by which the collectives of steps would take what they took, with the least relative error.

    Collectives of one kind and size count once, with the time in the middle. None if they are all of one size, from
    which a round cannot be told from a byte.
    """
    found: dict[tuple[str, int, int], list[float]] = {}
    for meeting in (meeting for step in steps for meeting in step.meetings):
        if meeting.is_whole and meeting.seconds > 0 and meeting.events[0].kind in COUNTED:
            found.setdefault(_sort(meeting), []).append(meeting.seconds)
    asked = [(rounds_and_share(kind, ranks), size) for kind, ranks, size in found]
    took = [statistics.median(seconds) for seconds in found.values()]
    # A line through what one round takes and carries.
    carried = [size * share / rounds for (rounds, share), size in asked]
    each = [seconds / rounds for seconds, ((rounds, _), _) in zip(took, asked, strict=True)]
    if len(set(carried)) < 2:
        return None
    latency, per_byte = straight_line(carried, each)
    misses = _misses(latency, per_byte, carried, each)
    return Link(latency, 1 / per_byte if per_byte > 0 else math.inf, len(found), statistics.median(misses), max(misses))


def _sort(meeting: Meeting) -> tuple[str, int, int]:
    return meeting.events[0].kind, len(meeting.ranks), meeting.events[0].bytes


def _misses(latency: float, per_byte: float, carried: Sequence[float], each: Sequence[float]) -> list[float]:
    pairs = zip(carried, each, strict=True)
    return [abs(latency + per_byte * size - seconds) / seconds for size, seconds in pairs]
