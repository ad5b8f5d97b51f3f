"""The collectives of a step, each as an op: from which memory into which, between which ranks, how many bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.core.buffers import Buffers
from paceline.core.collectives.algorithms import traffic
from paceline.core.layout import Bucket
from paceline.core.ops import BUFFERS, EXTRA, STATISTICS, WRITTEN, Key, Kind, Op, Phase, Span
from paceline.core.placement import Placement


@dataclass(frozen=True)
class Transfers(Placement):
    """The collectives that move buckets of parameters and gradients between ranks, and the buffers of both sides.

    Attributes:
        statistics: How many fp64 numbers the ranks agree on in each synchronised micro-batch.
    """

    statistics: int = 0

    def buffers(self, micro_batches: int = 1) -> Buffers:
        """Every buffer that a step of so many micro-batches needs."""
        return self._summing if self.strategy.reduces_every_micro_batch and micro_batches > 1 else self._plain

    def buffers_in(self, index: int, synchronise: bool) -> Buffers:
        """Every buffer of the steps that have such a micro-batch."""
        return self.buffers(1 if index == 0 and synchronise else 2)

    @cached_property
    def _plain(self) -> Buffers:
        return Buffers(self, False, self.statistics)

    @cached_property
    def _summing(self) -> Buffers:
        return Buffers(self, self.copies_gradients, self.statistics)

    # ---- parameters

    def gather(self, bucket: Bucket, index: int, phase: Phase, after: tuple[Key, ...] = ()) -> Op:
        """The op that gathers one bucket's parameters from their shards."""
        whole, own = self._plain.unsharded(bucket), self._plain.shard(bucket)
        # Where the shard is a part of the whole, it stays as it is.
        writes = (whole,) if own.buffer != whole.buffer else _without(whole, own)
        return self._communicate(
            "all_gather", bucket.name, index, phase, after, (own,), writes, bucket.numel, bucket.itemsize
        )

    def gather_kept(self) -> tuple[Op, ...]:
        """The ops that gather what is gathered once a step."""
        return tuple(self.gather(bucket, 0, "forward") for bucket in self.kept_buckets)

    def gather_again(self, unit: str, index: int, phase: Phase) -> tuple[Op, ...]:
        """The ops that gather a unit when no planned op does: a second forward, or units in another order."""
        found = (self.gather(bucket, index, phase) for bucket in self.gathered_buckets[unit])
        return tuple(replace(op, planned=False) for op in found)

    def gather_kept_again(self) -> tuple[Op, ...]:
        """`gather_kept` when no planned op does it, such as for a forward that follows an update without a pass."""
        return tuple(replace(op, planned=False) for op in self.gather_kept())

    def gather_update_again(self) -> tuple[Op, ...]:
        """The ops that gather whole parameters where shards were given other values, such as a checkpoint's."""
        return tuple(replace(op, planned=False) for op in self.send_update(EXTRA, ())) if self.gathers_updates else ()

    def gather_pinned(self, bucket: Bucket, phase: Phase) -> Op:
        """The op that gathers a bucket into memory of its own, as a parameter is used outside of its unit."""
        return replace(self.gather(bucket, EXTRA, phase), planned=False, writes=())

    def send_update(self, micro_batch: int, after: tuple[Key, ...]) -> list[Op]:
        """The ops by which ranks get what others have updated."""
        if self.gathers_updates:
            # The next forward needs the first units first.
            return [self.gather(bucket, micro_batch, "update", after) for bucket in reversed(self.reduced_buckets)]
        return [self._barrier(WRITTEN, micro_batch, after)] if self.shares_memory else []

    def meet(self, what: str, phase: Phase) -> Op:
        """The op behind which the ranks of a shard group have all come to one place, where it was not planned."""
        return replace(self._barrier(what, EXTRA, ()), phase=phase, planned=False)

    def _barrier(self, target: str, micro_batch: int, after: tuple[Key, ...]) -> Op:
        """The barrier around an update of parameters that ranks share."""
        return self._communicate("barrier", target, micro_batch, "update", after, (), (), 1, 8)

    # ---- gradients

    @property
    def reduction(self) -> Kind:
        """The collective that reduces a bucket's gradients; an all-reduce among replicas of a shard may follow it."""
        return "reduce_scatter" if self.shards > 1 else "all_reduce"

    def reduce(self, bucket: Bucket, index: int, synchronise: bool = True) -> tuple[Op, ...]:
        """The ops that reduce one bucket's gradients in micro-batch `index`, each after the one before.

        Replicas of a shard are reduced only where the micro-batch synchronises.
        """
        buffers = self.buffers_in(index, synchronise)
        after = tuple(Key("copy_in", unit, index, "backward") for unit in bucket.units)
        whole, result = buffers.gradient(bucket), buffers.reduced(bucket)
        reads = (whole, result) if index and self.strategy.reduces_every_micro_batch else (whole,)
        writes = (whole, result) if buffers.has_reduced else (whole,)
        ops = [
            self._communicate(
                self.reduction,
                *(bucket.name, index, "backward", after, reads, writes, bucket.numel, bucket.gradient_itemsize),
            )
        ]
        if synchronise and 1 < self.shards < self.world_size:
            flat = self.layout.flats[bucket.flat]
            item = flat.master_itemsize if buffers.sums else flat.gradient_itemsize
            numel, spans = bucket.numel // self.shards, (result,)
            ops.append(
                self._communicate(
                    "all_reduce",
                    *(bucket.name, index, "backward", (ops[0].key,), spans, spans, numel, item),
                    stream="replicate",
                )
            )
        return tuple(ops)

    def reduce_again(self, bucket: Bucket, index: int) -> tuple[Op, ...]:
        """The ops that reduce gradients which came after their bucket was: from memory of their own, then added."""
        return tuple(replace(op, planned=False, after=(), reads=(), writes=()) for op in self.reduce(bucket, index))

    def send_buffers(self, micro_batch: int, phase: Phase, size: int) -> Op:
        """The op that sends rank 0's buffers that forwards change, of so many bytes: after backward, and update."""
        op = self._communicate("broadcast", BUFFERS, micro_batch, phase, (), (), (), size, 1, stream="statistics")
        return replace(op, planned=False)

    def sum_numbers(self, what: str, micro_batch: int, phase: Phase, count: int) -> Op:
        """The op that sums a few fp64 numbers over all ranks, such as squares of gradients that were reduced again."""
        return replace(
            self._communicate("all_reduce", what, micro_batch, phase, (), (), (), count, 8, stream="statistics"),
            planned=False,
        )

    @property
    def scale(self) -> float:
        """Factor that makes a sum of gradients over ranks what `Strategy.gradients` says."""
        return 1 / self.world_size if self.strategy.gradients == "mean" else 1.0

    def _communicate(
        self,
        kind: Kind,
        target: str,
        micro_batch: int,
        phase: Phase,
        after: tuple[Key, ...],
        reads: tuple[Span, ...],
        writes: tuple[Span, ...],
        numel: int,
        itemsize: int,
        stream: str = "",
    ) -> Op:
        name = stream or (
            "statistics" if target == STATISTICS else "gather" if kind in ("all_gather", "barrier") else "reduce"
        )
        group = self.groups[name]  # type: ignore[index]
        sent, received = traffic(kind, *self.position_in(group), numel)
        return Op(
            kind,
            target,
            micro_batch,
            phase,
            name,  # type: ignore[arg-type]
            after,
            numel * itemsize,
            sent * itemsize,
            received * itemsize,
            group,
            reads,
            writes,
        )


def _without(whole: Span, part: Span) -> tuple[Span, ...]:
    """Returns the one or two spans that are left of a span without a part of it."""
    found = (Span(whole.buffer, whole.start, part.start), Span(whole.buffer, part.stop, whole.stop))
    return tuple(span for span in found if span.start < span.stop)
