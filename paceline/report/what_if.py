"""What a step would take with another stage, bucket size, number of devices or bandwidth: by simulation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.core.events import Event
from paceline.core.ops import COMPUTE, Key, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate
from paceline.report.link import Link, rounds_and_share
from paceline.report.prediction import Prediction
from paceline.report.program import Program
from paceline.report.variants import Setting, own_setting, variant

STEPS = 3
"""Simulated, of which the last has what the one before left to it."""


@dataclass(frozen=True)
class Cost:
    """What an op takes: a time that no bandwidth changes, and bytes that a link carries.

    Attributes:
        fixed: Seconds.
        carried: Bytes.
    """

    fixed: float
    carried: float = 0.0

    def seconds(self, bandwidth: float) -> float:
        """All of it."""
        return self.fixed + self.carried / bandwidth


@dataclass(frozen=True)
class Predicted:
    """A step once steps follow each other.

    Attributes:
        seconds: From the end of the step before to its own, by what computes.
        span: From its first compute op to its last, as the timeline measures a step.
        exposed: Of `seconds`, those in which nothing computes.
    """

    seconds: float
    span: float
    exposed: float


class WhatIf:
    """The slowest rank's step with other settings.

    An op of the run's own program costs what it took. Of other programs, forward and backward do, too; what touches
    each element (copying gradients in, the update, rounding masters) takes as long for each as it took; a collective
    takes what the fitted link says, times how much longer than that this kind took in the run; and other ops what those
    of their kind took on average.
    """

    def __init__(self, program: Program, prediction: Prediction, link: Link) -> None:
        """Simulates nothing yet.

        Args:
            program: What the run executed.
            prediction: Of its typical step.
            link: Fitted to what its collectives took.
        """
        self._program, self.link = program, link
        self.own = own_setting(program)
        self.bandwidth = link.bandwidth
        self.rank = max(prediction.seconds, key=lambda rank: prediction.seconds[rank])
        events = prediction.events(self.rank)
        self._ran = {Key(e.kind, e.target, e.micro_batch, e.phase): (e.start, e.end) for e in events}
        self._took = {key: end - start for key, (start, end) in self._ran.items()}

    def schedule(self, setting: Setting) -> Schedule:
        """The rank's schedule.

        Raises:
            UserError: The setting contradicts the run's others.
        """
        return variant(self._program, setting, self.rank)

    def costs(self, schedule: Schedule) -> dict[Key, Cost]:
        """What each op of a step costs."""
        ops = schedule.step(self._program.micro_batches)
        is_own = schedule.strategy == self._program.schedule.strategy
        return {
            op.key: self._compute(op) if op.kind in COMPUTE else self._collective(schedule, op, is_own) for op in ops
        }

    def predict(self, setting: Setting, bandwidth: float | None = None) -> Predicted:
        """The step.

        Args:
            setting: Of the program.
            bandwidth: Of a rank's link in bytes per second; the run's own if it is not given.

        Raises:
            UserError: The setting contradicts the run's others.
        """
        return self.simulated(self.schedule(setting), bandwidth or self.bandwidth)

    def simulated(self, schedule: Schedule, bandwidth: float) -> Predicted:
        """The step of any schedule of the run's model."""
        costs = self.costs(schedule)
        events = simulate(schedule, lambda op: costs[op.key].seconds(bandwidth), self._program.micro_batches, STEPS)
        return last_step(events)

    def times(self) -> dict[Key, tuple[float, float]]:
        """When the ops of the run's own step run, in seconds from its first; what its update sends comes last."""
        origin = min(start for start, _ in self._ran.values())
        return {key: (start - origin, end - origin) for key, (start, end) in self._ran.items()}

    def sent(self, setting: Setting) -> int:
        """Bytes that the rank sends in a step."""
        return sum(op.sent for op in self.schedule(setting).step(self._program.micro_batches))

    def uses_buckets(self, stage: int) -> bool:
        """Whether the size of buckets means anything at a stage: stage 3 moves units, and packing may be another."""
        return self._program.schedule.strategy.packing == "bucket" and (
            stage < 3 or self._program.schedule.strategy.share_parameters
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, with every setting."""
        return self._program.micro_batches

    # ---- costs

    def _compute(self, op: Op) -> Cost:
        own, size = self._own_ops.get(op.key), _elements(op)
        if own is not None and (op.kind in ("forward", "backward") or _elements(own) == size):
            return Cost(self._took[op.key])
        took, touched, count = self._by_kind.get(op.kind, (0.0, 0, 1))
        return Cost(took * size / touched if touched else took / count)

    def _collective(self, schedule: Schedule, op: Op, is_own: bool) -> Cost:
        longer = self._longer.get(op.key) if is_own else None
        if longer is None:
            longer = self._longer_by_kind.get((op.kind, op.stream), self._longer_overall)
        cost = self._by_link(schedule, op)
        return Cost(longer * cost.fixed, longer * cost.carried)

    @cached_property
    def _by_kind(self) -> dict[str, tuple[float, int, int]]:
        """What the run's compute ops of each kind took, how many elements they wrote, how many they are."""
        found: dict[str, tuple[float, int, int]] = {}
        for op in (op for op in self._own_ops.values() if op.kind in COMPUTE):
            took, touched, count = found.get(op.kind, (0.0, 0, 0))
            found[op.kind] = (took + self._took[op.key], touched + _elements(op), count + 1)
        return found

    def _by_link(self, schedule: Schedule, op: Op) -> Cost:
        rounds, share = rounds_and_share(op.kind, schedule.position_in(op.group)[1])
        return Cost(self.link.latency * rounds, op.bytes * share)

    @cached_property
    def _own_ops(self) -> dict[Key, Op]:
        return {op.key: op for op in self.schedule(self.own).step(self._program.micro_batches)}

    @cached_property
    def _own_collectives(self) -> Mapping[Key, tuple[Op, float]]:
        """The run's, with what the link says."""
        schedule = self.schedule(self.own)
        found = [op for op in self._own_ops.values() if op.kind not in COMPUTE]
        return {op.key: (op, self._by_link(schedule, op).seconds(self.bandwidth)) for op in found}

    @cached_property
    def _longer(self) -> dict[Key, float]:
        """How many times as long as by the link each of them took."""
        return {key: self._took[key] / seconds for key, (_, seconds) in self._own_collectives.items() if seconds > 0}

    @cached_property
    def _longer_by_kind(self) -> dict[tuple[str, str], float]:
        kinds = dict.fromkeys((op.kind, op.stream) for op, _ in self._own_collectives.values())
        return {kind: self._ratio(kind) for kind in kinds}

    def _ratio(self, kind: tuple[str, str]) -> float:
        return self._times(key for key, (op, _) in self._own_collectives.items() if (op.kind, op.stream) == kind)

    @cached_property
    def _longer_overall(self) -> float:
        """How many times longer all that move parameters or gradients are together."""
        return self._times(key for key, (op, _) in self._own_collectives.items() if op.stream != "statistics")

    def _times(self, keys: Iterable[Key]) -> float:
        chosen = list(keys)
        by_link = sum(self._own_collectives[key][1] for key in chosen)
        return sum(self._took[key] for key in chosen) / by_link if by_link > 0 else 1.0


def last_step(events: Sequence[Event]) -> Predicted:
    """The last of some steps that were simulated one after another."""
    last = max(event.step for event in events)
    ran = [event for event in events if event.stream == "compute"]
    ends = [max((event.end for event in ran if event.step == step), default=0.0) for step in (last - 1, last)]
    own = [event for event in ran if event.step == last]
    seconds, busy = ends[1] - ends[0], sum(event.seconds for event in own)
    return Predicted(seconds, ends[1] - min(event.start for event in own), max(0.0, seconds - busy))


def _elements(op: Op) -> int:
    """How many elements of buffers it writes."""
    return sum(span.stop - span.start for span in op.writes)
