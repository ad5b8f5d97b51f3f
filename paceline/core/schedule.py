"""One optimizer step as a list of operations on a table of buffers.

Pure: from a `Layout` and a `Strategy` follows what is computed, what is sent, in which order on which stream, between
which ranks, from which memory into which, and after what. The engine executes this list; the checker proves it, a
simulation predicts it, `memory` adds its buffers up and a report draws it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from paceline.core.buffers import has_master
from paceline.core.ops import (
    EXTRA,
    GRADIENTS,
    OPTIMIZER,
    PREVIOUS,
    READ,
    STATISTICS,
    WRITTEN,
    Key,
    Kind,
    Op,
    Phase,
    Span,
)
from paceline.core.prefetch import Prefetch
from paceline.core.transfers import Transfers


@dataclass(frozen=True)
class Schedule(Transfers):
    """The ops of one rank's optimizer step: `pl.engine_of(model).schedule`.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> [op.kind for op in pl.engine_of(model).schedule.step(micro_batches=1)]
        ['forward', 'backward', 'update']
    """

    _passes: dict[tuple[str, int, bool], tuple[Op, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # ---- a step

    def step(self, micro_batches: int) -> tuple[Op, ...]:
        """All ops of a step of `micro_batches` micro-batches, of which the last synchronises.

        None starts before the compute ops of the step before are over; collectives that follow its update may still be
        under way.
        """
        ops: list[Op] = []
        for index in range(micro_batches):
            ops += self.micro_batch(index, synchronise=index == micro_batches - 1)
        return (*ops, *self.update(micro_batches - 1))

    def micro_batch(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """Forward and backward of one micro-batch, with its collectives."""
        return (*self.forward(index), *self.backward(index, synchronise))

    def forward(self, index: int) -> tuple[Op, ...]:
        """The forward half of a micro-batch."""
        return self._remembered("forward", index, False)

    def extra_forward(self) -> tuple[Op, ...]:
        """A forward that is no part of a step, such as for evaluation: gathers every unit, wherever the step is."""
        return self._remembered("forward", EXTRA, False)

    def backward(self, index: int, synchronise: bool) -> tuple[Op, ...]:
        """The backward half of a micro-batch; where it synchronises, the step's gradients are complete after it."""
        return self._remembered("backward", index, synchronise)

    def _remembered(self, phase: str, index: int, synchronise: bool) -> tuple[Op, ...]:
        # The engine asks in every step, and a large model has hundreds of buckets.
        key = (phase, index, synchronise)
        if key not in self._passes:
            ops = self._forward(index) if phase == "forward" else self._backward(index, synchronise)
            self._passes[key] = tuple(replace(op, planned=False) for op in ops) if index == EXTRA else tuple(ops)
        return self._passes[key]

    # ---- forward

    def unforeseen(self, kind: Literal["forward", "backward"], unit: str, index: int) -> Op:
        """The op of a unit's computing where none is planned: in the first forward, or of a unit that ran in none."""
        return Op(kind, unit, index, kind, "compute", planned=False)

    def _forward(self, index: int) -> list[Op]:
        ops: list[Op] = []
        if self.shards_parameters and index == 0:
            ops += self.gather_kept()
        needed: Mapping[str, tuple[Key, ...]] = {}
        first = tuple(op.key for op in ops)
        if index == 0:
            needed, before = self.sent_before
            first = (*first, *before)
        held = self.occupied(()) if index in (0, EXTRA) else self.occupied(self.gathered_units[: self.slots])
        walk = Prefetch(self, "forward", index, self.order, held)
        for unit in self.computed_units:
            ops += walk.ahead()
            if unit in self.slot and (self.reshards_after_forward or index in (0, EXTRA)):
                ops.append(self._present("unshard", unit, index, "forward", walk.needs(unit)))
            after = dict.fromkeys((*needed.get(unit, ()), *first))
            ops.append(Op("forward", unit, index, "forward", "compute", tuple(after), reads=self.parameters_of(unit)))
            if unit in self.slot and self.reshards_after_forward:
                ops.append(self._present("reshard", unit, index, "forward"))
            walk.ran(unit)
            first = ()
        return ops

    def parameters_of(self, unit: str) -> tuple[Span, ...]:
        """Returns the parameters that a unit may compute with: its own, and those of no unit that runs."""
        found = dict.fromkeys((*self.buckets_of.get(unit, ()), *self.unowned_buckets))
        return tuple(self._plain.unsharded(bucket) for bucket in found)

    @cached_property
    def sent_before(self) -> tuple[Mapping[str, tuple[Key, ...]], tuple[Key, ...]]:
        """The gathers that the step before sends after its update: by the unit that waits, and for the first one."""
        ran = set(self.computed_units)
        needed: dict[str, tuple[Key, ...]] = {}
        first: tuple[Key, ...] = ()
        sent = {op.target: op.key for op in self.send_update(PREVIOUS, ())}
        if WRITTEN in sent:
            return needed, (sent[WRITTEN],)
        for bucket in (each for each in self.reduced_buckets if each.name in sent):
            for unit in bucket.units:
                if unit in ran:
                    needed[unit] = (*needed.get(unit, ()), sent[bucket.name])
                else:
                    first = (*first, sent[bucket.name])
        return needed, first

    @cached_property
    def of_step_before(self) -> frozenset[Key]:
        """What the step before leaves to be waited for: all that it sends after its update."""
        return frozenset(op.key for op in self.send_update(PREVIOUS, ()))

    def _present(self, kind: Kind, unit: str, index: int, phase: Phase, after: tuple[Key, ...] = ()) -> Op:
        spans = tuple(self._plain.unsharded(bucket) for bucket in self.gathered_buckets[unit])
        return Op(kind, unit, index, phase, "compute", after, reads=spans)

    # ---- backward

    def _backward(self, index: int, synchronise: bool) -> list[Op]:
        ops: list[Op] = []
        communicates = self.world_size > 1 and (synchronise or self.strategy.reduces_every_micro_batch)
        reduces = list(self.reduced_buckets) if communicates else []
        copied: set[str] = set()
        # What must be reduced before gradients are copied to where it lies.
        lent: dict[int | str, Key] = {}
        if index > 0 and self.world_size > 1 and self.strategy.reduces_every_micro_batch:
            lent = {self.copied_to(b): self.reduce(b, index - 1, False)[0].key for b in self.reduced_buckets}

        def copy_in(unit: str) -> None:
            mine = [bucket for bucket in self.buckets_of.get(unit, ()) if bucket.trainable]
            if not self.copies_gradients or not mine:
                return
            waits = tuple(lent[place] for place in dict.fromkeys(map(self.copied_to, mine)) if place in lent)
            ops.append(self._copy_in(unit, index, synchronise, waits))
            copied.add(unit)
            while reduces and copied.issuperset(reduces[0].units):
                bucket = reduces.pop(0)
                reduction = self.reduce(bucket, index, synchronise)
                ops.extend(reduction)
                lent[self.copied_to(bucket)] = reduction[0].key

        walk = Prefetch(self, "backward", index, self.order[::-1], self.occupied(self.gathered_units[-self.slots :]))
        for unit in reversed(self.computed_units):
            ops += walk.ahead()
            if unit in self.slot and self.reshards_after_forward:
                ops.append(self._present("unshard", unit, index, "backward", walk.needs(unit)))
            ops.append(Op("backward", unit, index, "backward", "compute", reads=self.parameters_of(unit)))
            if unit in self.slot and self.reshards_after_forward:
                ops.append(self._present("reshard", unit, index, "backward"))
            walk.ran(unit)
            if unit in self.copied_in_backward:
                copy_in(unit)
        for unit in self.copied_after_backward:
            copy_in(unit)
        if synchronise and self.copies_gradients:
            ops += self._agree(index, tuple(op.key for op in ops if op.stream in ("reduce", "replicate")))
        return ops

    def _copy_in(self, unit: str, index: int, synchronise: bool, after: tuple[Key, ...]) -> Op:
        buffers = self.buffers_in(index, synchronise)
        spans = tuple(
            buffers.gradient_of(self.layout.slots[slot], bucket)
            for bucket in self.buckets_of[unit]
            if bucket.trainable
            for slot in bucket.slots
            if self.layout.slots[slot].spec.unit == unit
        )
        # Gradients that nothing reduced since the micro-batch before are added to.
        adds = index > 0 and not (self.world_size > 1 and self.strategy.reduces_every_micro_batch)
        return Op("copy_in", unit, index, "backward", "compute", after, reads=spans if adds else (), writes=spans)

    def _agree(self, index: int, reductions: tuple[Key, ...]) -> list[Op]:
        """The ops that end a synchronised backward: ranks agree on a few numbers, and gradients are published."""
        ops: list[Op] = []
        buffers = self.buffers(index + 1)
        reduced = tuple(buffers.reduced(bucket) for bucket in self.updated_buckets)
        published = tuple(buffers.published(bucket) for bucket in self.updated_buckets)
        agreed: tuple[Span, ...] = ()
        if self.world_size > 1:
            agreed = (Span("statistics", 0, self.statistics),)
            # What ranks agree on includes the norm, which each knows of its shard once that is reduced.
            after, read = (reductions, reduced) if self.shards > 1 else ((), ())
            ops.append(Op("statistics", STATISTICS, index, "backward", "compute", after, reads=read, writes=agreed))
            summed = self._communicate(
                "all_reduce", STATISTICS, index, "backward", (ops[0].key,), agreed, agreed, self.statistics, 8
            )
            ops.append(summed)
            reductions = (*reductions, summed.key)
        if widened := tuple(span for span in published if span not in reduced):
            reads = (*reduced, *agreed)
            ops.append(Op("widen", GRADIENTS, index, "backward", "compute", reductions, reads=reads, writes=widened))
            reductions = (ops[-1].key,)
        reads = (*published, *agreed)
        ops.append(Op("publish", GRADIENTS, index, "backward", "compute", reductions, reads=reads))
        return ops

    # ---- update

    def update(self, micro_batch: int) -> tuple[Op, ...]:
        """The optimizer's update after the synchronised micro-batch, and what follows it."""
        if micro_batch not in self._updates:
            # Asked for several times a step, and the same in nearly all steps.
            self._updates[micro_batch] = self._update(micro_batch)
        return self._updates[micro_batch]

    @cached_property
    def _updates(self) -> dict[int, tuple[Op, ...]]:
        return {}

    def _update(self, micro_batch: int) -> tuple[Op, ...]:
        after: tuple[Key, ...] = ()
        if self.copies_gradients:
            after = (Key("publish", GRADIENTS, micro_batch, "backward"),)
        buffers = self.buffers(micro_batch + 1)
        ops: list[Op] = []
        if self.shares_memory:
            ops.append(self._barrier(READ, micro_batch, after))
            after = (ops[0].key,)
        updated = self.updated_buckets
        masters = tuple(buffers.master(bucket) for bucket in updated)
        gradients = tuple(buffers.published(bucket) for bucket in updated) if self.copies_gradients else ()
        ops.append(
            Op("update", OPTIMIZER, micro_batch, "update", "compute", after, reads=gradients + masters, writes=masters)
        )
        rounded = [bucket for bucket in updated if has_master(self.layout.flats[bucket.flat])]
        if rounded:
            masters = tuple(buffers.master(bucket) for bucket in rounded)
            shards = tuple(buffers.shard(bucket) for bucket in rounded)
            ops.append(
                Op("cast", OPTIMIZER, micro_batch, "update", "compute", (ops[-1].key,), reads=masters, writes=shards)
            )
        return (*ops, *self.send_update(micro_batch, (ops[-1].key,)))

    def update_around_passes(self, micro_batch: int) -> tuple[Op, ...]:
        """`update` of an optimizer inside whose step passes have run: ranks have met since they read parameters."""
        ops = [op for op in self.update(micro_batch) if op.target != READ]
        kept = {op.key for op in ops}
        return tuple(replace(op, planned=False, after=tuple(key for key in op.after if key in kept)) for op in ops)

    def lone_update(self, micro_batch: int) -> tuple[Op, ...]:
        """`update` where no backward of the step came before it, such as the first of a loop that has no gradients."""
        return tuple(
            replace(op, planned=False, after=tuple(key for key in op.after if key.kind != "publish"))
            for op in self.update(micro_batch)
        )
