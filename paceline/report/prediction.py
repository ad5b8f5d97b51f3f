"""What a step would take by the schedule alone: its ops with the times that they were measured to take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.core.events import Event
from paceline.core.ops import COMPUTE, Key, Op
from paceline.core.simulate import simulate
from paceline.report.program import Program
from paceline.report.steps import Step

_STEPS = 3
"""Simulated, of which the last has what the one before left to it."""


@dataclass(frozen=True)
class Change:
    """Something that could be otherwise.

    Attributes:
        what: In words, after "if".
        gain: By which share of a step's time it would be shorter.
    """

    what: str
    gain: float


class Prediction:
    """Each rank's step as simulated with what its own ops take; nobody to wait for, and no pause between ops.

    Each op takes the middle of what it took in the recorded steps. A collective is counted from when its last rank had
    come. One that is not among the events takes what others took for each byte.
    """

    def __init__(self, program: Program, *steps: Step) -> None:
        """Simulates nothing yet.

        Args:
            program: What the steps executed.
            steps: Recorded ones, at least one, which the program suits.
        """
        self._program, self._steps = program, steps

    @cached_property
    def seconds(self) -> dict[int, float]:
        """How long the compute ops of a step would take each rank, from the first to the last."""
        return {rank: _span(self.events(rank)) for rank in self._measured}

    def events(self, rank: int, factor: Callable[[Op], float] = lambda op: 1.0) -> list[Event]:
        """The events of a step of one rank.

        Args:
            rank: A rank that there are events of.
            factor: How many times as long each op takes.
        """
        own, shared = self._measured[rank], self._transfers
        per_byte = self._seconds_per_byte

        def costs(op: Op) -> float:
            known = own if op.kind in COMPUTE else shared
            return factor(op) * known.get(op.key, per_byte * op.bytes if op.kind not in COMPUTE else 0.0)

        schedule = replace(self._program.schedule, rank=rank)
        events = simulate(schedule, costs, self._program.micro_batches, _STEPS)
        return [event for event in events if event.step == _STEPS - 1]

    def changes(self, waits: float) -> list[Change]:
        """What would help, and how much: the most first.

        Collectives that take no time are simulated; pauses are what the slowest rank's steps had between ops.

        Args:
            waits: Share of a step that ranks stand still for one that is slow; 0 where none is.
        """
        slowest = max(self.seconds, key=lambda rank: self.seconds[rank])
        longest = self.seconds[slowest]
        free = _span(self.events(slowest, lambda op: 1.0 if op.kind in COMPUTE else 0.0))
        own = [times for step in self._steps for times in step.ranks if times.rank == slowest]
        length, pauses = (statistics.median(getattr(times, name) for times in own) for name in ("seconds", "between"))
        if longest <= 0 or length <= 0:
            return []
        found = [
            Change("collectives took no time", 1 - free / longest),
            Change("nothing happened between ops", pauses / length),
        ]
        if waits:
            found.append(Change("no rank were slower than the others", waits))
        return sorted(found, key=lambda change: -change.gain)

    @cached_property
    def _measured(self) -> dict[int, dict[Key, float]]:
        """What each compute op took each rank."""
        found: dict[int, dict[Key, list[float]]] = {}
        for event in (event for step in self._steps for event in step.events):
            if event.planned and event.kind in COMPUTE:
                key = Key(event.kind, event.target, event.micro_batch, event.phase)
                found.setdefault(event.rank, {}).setdefault(key, []).append(event.seconds)
        return {rank: _middles(ops) for rank, ops in found.items()}

    @cached_property
    def _transfers(self) -> dict[Key, float]:
        """What each collective took from when its last rank had come; of several groups, the slowest."""
        found: dict[Key, list[float]] = {}
        for step in self._steps:
            slowest: dict[Key, float] = {}
            for meeting in step.meetings:
                event = meeting.events[0]
                key = Key(event.kind, event.target, event.micro_batch, event.phase)
                slowest[key] = max(meeting.seconds, slowest.get(key, 0.0))
            for key, seconds in slowest.items():
                found.setdefault(key, []).append(seconds)
        return _middles(found)

    @cached_property
    def _seconds_per_byte(self) -> float:
        sizes = {
            op.key: op.bytes for op in self._program.ops if op.key in self._transfers and op.stream != "statistics"
        }
        whole = sum(sizes.values())
        return sum(self._transfers[key] for key in sizes) / whole if whole else 0.0


def _middles(found: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def _span(events: Sequence[Event]) -> float:
    ran = [event for event in events if event.stream == "compute"]
    return max(event.end for event in ran) - min(event.start for event in ran) if ran else 0.0
