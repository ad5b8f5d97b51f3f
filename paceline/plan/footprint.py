"""What one rank holds through a step, by kind: the schedule's buffers, and what the model's passes come and go with.

The buffers live as long as the engine. Activations grow in forward and shrink in backward; where a unit is recomputed,
its inside is there for its own backward alone. Logits are there at the turn. A unit's gradients lie between autograd
and their bucket, or stay where autograd put them if nothing copies them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from paceline.core.layout import ROOT
from paceline.core.memory import memory
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.plan.recomputed import recomputed_units
from paceline.plan.work import UnitWork, Work

KINDS = ("parameters", "gradients", "optimizer", "activations", "logits", "buckets", "gathered", "framework")
"""In the order in which a table shows them."""

FREE = 0.07
"""Share of a device's memory that a forecast leaves free for a run to fit. Published peaks whose kernels are known
exceed their forecasts by up to 6 % (docs/accuracy.md); fragments of the allocator come beside."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that one rank holds at the fullest moment of a step, by kind.

    Attributes:
        parameters: What is computed with: whole, or this rank's shards; and the model's buffers.
        gradients: What lives from backward to update, and a unit's gradients between autograd and their bucket.
        optimizer: The optimizer's states, and the master that it updates under low precision.
        activations: What is kept for backward, and what a pass needs beside it.
        logits: The output layer's results and what the loss makes of them.
        buckets: Slots for whole gradients on their way to be reduced.
        gathered: Slots for whole parameters of the units that compute.
        framework: What PyTorch, driver and communicators take outside of the allocator.
        steady: All that is held between two steps.
        moment: When the step is fullest, such as "backward of blocks.3".
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buckets: int
    gathered: int
    framework: int
    steady: int
    moment: str

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind."""
        return {name: getattr(self, name) for name in KINDS}

    @property
    def peak(self) -> int:
        """All that is held at the fullest moment."""
        return sum(self.by_kind.values())


def footprint(
    work: Work, schedule: Schedule, micro_batches: int = 1, *, framework: int = 0, states: int = 2, buffers: int = 0
) -> Footprint:
    """What one rank holds during its steps.

    Args:
        work: Of one micro-batch.
        schedule: Gives layout, strategy and number of ranks.
        micro_batches: Micro-batches of a step.
        framework: Bytes outside of what is counted, as in `Hardware.framework`.
        states: Numbers that the optimizer keeps for each parameter; it is taken for a fused one, which needs no others.
        buffers: Bytes of the model's buffers.
    """
    held = memory(schedule, micro_batches, states)
    # Where nothing copies gradients they are autograd's own, which come in backward and are gone after the update.
    kept = held.gradients if schedule.copies_gradients else 0
    fullest = max(moments(work, schedule, micro_batches), key=lambda moment: moment.total)
    return Footprint(
        parameters=held.parameters + buffers,
        gradients=kept + fullest.gradients,
        optimizer=held.optimizer,
        activations=fullest.activations,
        logits=fullest.logits,
        buckets=held.buckets,
        gathered=held.gathered,
        framework=framework,
        steady=held.total - held.gradients + kept + framework + buffers,
        moment=fullest.name,
    )


class Moment(NamedTuple):
    """What comes and goes within a step, at one moment of it, in bytes."""

    name: str
    activations: int
    logits: int
    gradients: int
    """Of autograd, beside the schedule's buffers."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.logits + self.gradients


def moments(work: Work, schedule: Schedule, micro_batches: int = 1) -> Iterator[Moment]:
    """The moments of a step at which it may be fullest: each unit's forward and backward, and the update.

    Of several micro-batches the first and the second stand for all: in the second, gradients are there from before.
    """
    # What is the model's own and nobody else's has its gradients in the model's own backward.
    root_is_own = not work.shares and any(not unit.unit for unit in work.units)
    gradients = _Gradients(schedule, micro_batches, root_is_own)
    recomputed = recomputed_units([unit.unit for unit in work.units], schedule.strategy)
    kept = [_kept(unit, schedule.strategy) if unit.unit in recomputed else unit.kept for unit in work.units]
    last = len(kept) - 1
    # They stay from the output layer, or from a loss beside the units, to the backward of what keeps them.
    logits = list(accumulate(0 if unit.unit in recomputed else unit.logits for unit in work.units))
    for index in range(min(micro_batches, 2)):
        gradients.begin(index)
        alive = 0
        for position, unit in enumerate(work.units):
            alive += kept[position]
            # What the loss makes of logits before it keeps what is left of them is theirs, too.
            of_logits = logits[position] + (unit.forward_peak if unit.logits else 0)
            now = alive + unit.forward_peak - of_logits
            yield Moment(f"forward of {unit.unit or 'the model'}", now, of_logits, gradients.held)
        for position in range(last, -1, -1):
            unit = work.units[position]
            inside = unit.kept - kept[position]
            of_logits = logits[position] + (unit.logits if unit.unit in recomputed else 0)
            of_others, own, one_by_one = gradients.backward(unit.unit, first=position == 0)
            beyond = unit.backward_peak
            if unit.backward_whole and not one_by_one:
                # Its gradients come while what it keeps goes.
                beyond = max(unit.backward_whole, beyond) - own
            now = alive + inside - of_logits + beyond
            yield Moment(f"backward of {unit.unit or 'the model'}", now, of_logits, of_others + own)
            alive -= kept[position]
    yield Moment("update", 0, 0, gradients.published)


class _Gradients:
    """Follows autograd's gradients: those of the units whose backward is over, and of the one under way."""

    def __init__(self, schedule: Schedule, micro_batches: int, root_is_own: bool) -> None:
        self._early = schedule.copied_early
        self._copies, self._low = schedule.copies_gradients, schedule.strategy.low
        self._defers = not schedule.strategy.reduces_every_micro_batch or schedule.world_size == 1
        self._of, self._largest = _computed_bytes(schedule, "" if root_is_own else ROOT)
        self._seen_shared = False
        self.held, self._index = 0, 0
        transient = sum(buffer.bytes for buffer in schedule.buffers(micro_batches) if buffer.transient)
        self.published = transient if self._copies else sum(self._of.values())

    def begin(self, micro_batch: int) -> None:
        """A micro-batch's forward begins."""
        self._index, self._seen_shared = micro_batch, False

    def backward(self, unit: str, first: bool) -> tuple[int, int, bool]:
        """What there is during a unit's backward, which is the model's last one where it is the `first`.

        Returns:
            Bytes of other gradients and of its own at most, and whether its own are there one at a time.
        """
        # Where gradients are added to what is there, autograd makes one parameter's at a time.
        adds = self._index > 0 and (not self._copies or (self._defers and not self._low))
        own, shared = (self._largest.get(unit, 0), 0) if adds else (self._of.get(unit, 0), self._of.get(ROOT, 0))
        if not self._seen_shared:
            self._seen_shared = True
            self.held += shared
        # The embedding's share of a tied weight's gradient is whole beside the output layer's, and their sum a third.
        others = self.held + (2 * self._largest.get(ROOT, 0) if first else 0)
        if not adds and (not self._copies or unit not in self._early):
            self.held += own
        if first and self._copies:
            self.held = 0
        return others, own, adds


def _computed_bytes(schedule: Schedule, root: str) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Bytes of each unit's gradients as autograd computes them, and of the largest one among them.

    Args:
        schedule: Gives the layout.
        root: The name under which those of the root are.
    """
    whole: Counter[str] = Counter()
    largest: dict[str, int] = {}
    for slot in schedule.layout.slots:
        if slot.spec.trainable:
            size = slot.spec.numel * schedule.layout.flats[slot.flat].itemsize
            unit = root if slot.spec.unit == ROOT else slot.spec.unit
            whole[unit] += size
            largest[unit] = max(largest.get(unit, 0), size)
    return whole, largest


def _kept(unit: UnitWork, strategy: Strategy) -> int:
    return unit.kept_attention if strategy.recompute == "keep_attention" else unit.kept_input
