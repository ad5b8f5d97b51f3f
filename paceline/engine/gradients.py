"""Gradients between autograd and the flat buffers: copied in, reduced elsewhere, published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.core.buffers import Buffers
from paceline.core.errors import UserError
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule
from paceline.engine.assigned_gradient import set_gradient
from paceline.engine.gradient_shard import GradientShard, as_shard
from paceline.engine.handed_out import HandedOut
from paceline.engine.parameters import Parameters
from paceline.engine.tensors import Tensors, parameter_in


class Gradients:
    """Moves each parameter's gradient into its bucket and hands the reduced one back.

    Between two backward passes `p.grad` is all there is: what a loop scales, zeroes, replaces or drops there is what
    counts. It is one of

    - None;
    - this rank's share of a sum that is not reduced yet: a view of the whole gradients, which autograd adds to;
    - the reduced gradient, or this rank's shard of it (`GradientShard`).

    What is reduced already becomes a share again when a later backward adds to it, such that the next reduction gives
    what it was plus what has come.

    Attributes:
        fired: Indices of the parameters that autograd has added a gradient to in this backward.
        synchronises: Whether this backward reduces the step's gradients.
        used: Those that have a gradient on this rank, in this step where it is not dropped in between.
    """

    def __init__(
        self, schedule: Schedule, parameters: Parameters, tensors: Tensors, wait: Callable[[Bucket], None]
    ) -> None:
        """Allocates the buffers. A collective call where ranks communicate.

        Args:
            schedule: Gives layout, buffers and slots.
            parameters: Of the same layout.
            tensors: Allocates the buffers.
            wait: Waits for the reductions of a bucket that are under way.
        """
        self._wait = wait
        self._place(schedule, parameters, tensors, 1)
        # What a rank's share of a reduced gradient must be so that the sum over ranks gives it again.
        holders = schedule.replicas if self._shards > 1 else 1 if schedule.has_server else schedule.world_size
        self._share = (schedule.world_size if schedule.strategy.gradients == "mean" else 1) / holders
        self._carried: dict[int, Tensor] = {}
        self._adds: set[str] = set()
        self._late_before: dict[int, Tensor] = {}
        self._used_before: set[int] = set()
        self._copied: set[int] = set()
        self._filled: set[int] = set()
        self._micro_batch, self.synchronises = 0, True
        self.fired: set[int] = set()
        self.used: set[int] = set()

    def replace(self, schedule: Schedule, parameters: Parameters, tensors: Tensors) -> None:
        """Allocates other buffers, between two steps, as units run in another order: see `__init__`."""
        self._place(schedule, parameters, tensors, 2 if self._buffers.sums else 1)

    def _place(self, schedule: Schedule, parameters: Parameters, tensors: Tensors, micro_batches: int) -> None:
        self._schedule, self._parameters, self._tensors = schedule, parameters, tensors
        self._layout, self._all = schedule.layout, parameters.all
        self._shards, self._index = schedule.shards, schedule.shard_index
        # One rank has nothing to reduce: what its micro-batches give adds up as it is copied in.
        self._each, self._low = schedule.strategy.reduces_each and schedule.world_size > 1, schedule.strategy.low
        self.buckets = schedule.reduced_buckets
        self._buffers: Buffers = schedule.buffers(micro_batches)
        self._tensors.allocate(self._buffers, "gradients", "slots", "reduced")
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.slots}
        self._handed_out = HandedOut()
        self.trainable = sorted(self._bucket_of)
        self._view_whole()

    @staticmethod
    def looks_before(schedule: Schedule) -> bool:
        """Whether what `p.grad` holds must be taken out of autograd's way before it adds to it."""
        strategy = schedule.strategy
        by_others = schedule.has_server or strategy.gradients == "sum"
        return schedule.shards > 1 or strategy.low or strategy.reduces_each or by_others

    # ---- one backward

    def begin(self, micro_batch: int, synchronises: bool, reduced: bool) -> None:
        """Prepares for a backward: what `p.grad` holds becomes what its gradients are added to.

        Args:
            micro_batch: Number within the step.
            synchronises: Whether gradients are reduced in it for the step.
            reduced: Whether what `p.grad` holds has been reduced already.
        """
        self._micro_batch, self.synchronises = micro_batch, synchronises
        self.fired.clear()
        self.used.clear()
        self._copied.clear()
        self._filled.clear()
        self._carried.clear()
        self._adds.clear()
        if self._schedule.strategy.reduces_each and not self._buffers.sums and (micro_batch or not synchronises):
            self._sum_over_micro_batches()
        held = [index for index in self.trainable if self._all[index].grad is not None]
        self._let_go(held)
        if self._each:
            own = [i for i in held if reduced or isinstance(self._all[i].grad, GradientShard)]
            # Of which this rank has no part, it cannot tell whether the loop dropped them: others can.
            kept = {*own, *(i for i in self._used_before if own and self._reduced_of(i) is None)}
            self._used_before = kept & (self._used_before | self._unknown(own))
            self._carry(own, reduced)
        elif reduced and (self._shards > 1 or self._share != 1):
            self._share_out(held)
        elif self._low:
            self._take_aside(held)
        for index, gradient in self._late_before.items():
            if index in held or self._reduced_of(index) is None:
                self._all[index].grad = gradient
        self._late_before.clear()

    def _let_go(self, held: Iterable[int]) -> None:
        """Buckets are about to be written again; what a loop keeps of those that it dropped `p.grad` of stays."""
        added_to = {self._bucket_of[index].name for index in held}
        for bucket in self.buckets:
            if bucket.name not in added_to:
                self._handed_out.let_go(f"{bucket.name}, whole")
                self._handed_out.let_go(f"{bucket.name}, reduced")

    def _unknown(self, held: Sequence[int]) -> set[int]:
        """Those whose `grad` the loop itself has made."""
        return {index for index in held if not isinstance(self._all[index].grad, GradientShard)}

    def reset(self) -> None:
        """Forgets what a step that is given up has left."""
        self._late_before.clear()
        self._used_before.clear()
        self._carried.clear()

    def _sum_over_micro_batches(self) -> None:
        """From now on reduced gradients are summed over micro-batches, beside the whole ones where these are sent."""
        self._buffers = self._schedule.buffers(2)
        if self._each:
            self._tensors.allocate(self._buffers, "reduced")
        else:
            self._tensors.allocate(self._buffers, "gradients", "reduced")
            self._view_whole()

    def _view_whole(self) -> None:
        self._whole = {
            index: parameter_in(self.whole(bucket), self._layout.slots[index], bucket.start)
            for index, bucket in self._bucket_of.items()
        }

    def _carry(self, held: Sequence[int], reduced: bool) -> None:
        """Where every micro-batch is reduced: keeps what `p.grad` holds where the next reductions are added."""
        with torch.no_grad():
            if self._micro_batch == 0 and self.synchronises:
                # It is alone in its step: what was there is added when it is published.
                self._carried = {index: self._flat(index).clone() for index in held}
            else:
                present = set(held)
                for bucket in self.buckets:
                    if not present.isdisjoint(bucket.slots):
                        self._adds.add(bucket.name)
                        self._restore(bucket, present, reduced)
        for index in held:
            self._all[index].grad = None

    def _restore(self, bucket: Bucket, present: set[int], reduced: bool) -> None:
        """Puts what `p.grad` holds of a bucket back to where it was reduced to, if a loop changed it."""
        # Replicas will add it up among each other once more.
        factor = 1 / self._schedule.replicas if reduced and self._shards > 1 else 1.0
        for index in bucket.slots:
            place = self._reduced_of(index)
            if place is None:
                continue
            mine = self._flat(index) if index in present else None
            if mine is not None and mine.data_ptr() == place.data_ptr() and factor == 1:
                continue
            self._wait(bucket)
            if mine is None:
                place.zero_()
            elif mine.data_ptr() != place.data_ptr():
                place.copy_(mine)
            if factor != 1:
                place.mul_(factor)

    def _share_out(self, held: Sequence[int]) -> None:
        """Makes reduced gradients this rank's share of themselves, whole."""
        with torch.no_grad():
            for index in held:
                mine, whole = self._flat(index) * self._share, self._whole[index]
                self._all[index].grad = None
                whole.zero_()
                self._own_part(index, whole).copy_(mine)
                if self._low:
                    self._filled.add(index)
                else:
                    self._all[index].grad = self._shown_whole(index)

    def _take_aside(self, held: Sequence[int]) -> None:
        """In low precision: gradients add up in fp32 buffers, where autograd would add in what it computes in."""
        with torch.no_grad():
            for index in held:
                gradient, whole = self._all[index].grad, self._whole[index]
                assert gradient is not None
                if gradient.data_ptr() != whole.data_ptr():
                    whole.copy_(gradient)
                self._all[index].grad = None
                self._filled.add(index)

    def _own_part(self, index: int, whole: Tensor) -> Tensor:
        """The part of a parameter's whole gradient that is in this rank's shard."""
        if self._shards == 1:
            return whole
        slot = self._layout.slots[index]
        start, stop = self._layout.shard_of(self._bucket_of[index], index, self._index, self._shards)
        first = int(whole.storage_offset()) + start - slot.offset
        return whole.as_strided((stop - start,), (1,), first)

    def _flat(self, index: int) -> Tensor:
        """What `p.grad` holds, as the part of it that this rank keeps reduced."""
        gradient = self._all[index].grad
        assert gradient is not None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(gradient, GradientShard):
                return gradient.as_subclass(Tensor)
            return self._parameters.cut(index, gradient) if self._shards > 1 else gradient.detach()

    def accumulated(self, index: int) -> None:
        """Autograd has added to a parameter's gradient."""
        self.fired.add(index)

    def copy_in(self, indices: Iterable[int]) -> None:
        """Copies the gradients of some parameters into their buckets, zero where one has none.

        Raises:
            UserError: One is sparse.
        """
        views: list[Tensor] = []
        fresh: list[Tensor] = []
        added: list[tuple[Tensor, Tensor]] = []
        sends = self.synchronises or self._each
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in indices:
                if (view := self._whole.get(index)) is None:
                    continue
                parameter = self._all[index]
                self._copied.add(index)
                gradient = parameter.grad
                if gradient is None:
                    if index in self._filled:
                        self.used.add(index)
                    elif sends:
                        view.zero_()
                    continue
                self.used.add(index)
                if gradient.is_sparse:
                    raise UserError(
                        f"{self._layout.slots[index].spec.name} has a sparse gradient; flat buffers "
                        "hold dense ones: build the embedding with sparse=False"
                    )
                if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
                    if index in self._filled:
                        added.append((view, gradient))
                    else:
                        views.append(view)
                        fresh.append(gradient)
                if self._low:
                    self._filled.add(index)
                # Autograd must not add to memory that a collective reads: what is late comes apart.
                parameter.grad = None if sends or self._low else self._shown_whole(index)
            if views:
                torch._foreach_copy_(views, fresh)
            for view, gradient in added:
                view.add_(gradient)

    def late(self) -> list[int]:
        """Parameters whose gradient arrived after they were copied in."""
        return [
            index
            for index in sorted(self._copied)
            if (gradient := self._all[index].grad) is not None and gradient.data_ptr() != self._whole[index].data_ptr()
        ]

    def keep_late(self) -> None:
        """Keeps gradients that came after a reduction of which the step has another, for that one."""
        for index in self.late():
            gradient = self._all[index].grad
            assert gradient is not None
            self._late_before[index] = gradient
            self._all[index].grad = None

    def write_late(self, bucket: Bucket, late: Collection[int], spare: Tensor) -> None:
        """Writes gradients that came late, and zeros, to memory like a bucket's."""
        spare.zero_()
        for index in set(late) & set(bucket.slots):
            gradient = self._all[index].grad
            assert gradient is not None
            parameter_in(spare, self._layout.slots[index], bucket.start).copy_(gradient)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has a gradient on this rank, so that no other rank need be asked."""
        return len(self.used_in_step) == len(self.trainable)

    @property
    def used_in_step(self) -> set[int]:
        """Parameters that have a gradient on this rank that the step's reduced ones hold."""
        return self.used | self._used_before

    # ---- reduction

    def whole(self, bucket: Bucket) -> Tensor:
        """The whole gradients of a bucket, flat."""
        return self._tensors[self._buffers.gradient(bucket)]

    def own(self, bucket: Bucket, whole: Tensor) -> Tensor:
        """This rank's shard of a bucket's whole gradients, which a reduction in place leaves there."""
        size = bucket.numel // self._shards
        return whole[self._index * size : (self._index + 1) * size]

    def reduced(self, bucket: Bucket) -> Tensor:
        """This rank's shard of the step's reduced gradients of a bucket, flat."""
        return self._tensors[self._buffers.reduced(bucket)]

    def destination(self, bucket: Bucket) -> Tensor | None:
        """Where a reduction stores this rank's shard, if neither in place nor added to what is there."""
        stores = self._buffers.beside and not self._is_added(bucket)
        return self.reduced(bucket) if stores and self._shards > 1 else None

    def after_reduction(self, bucket: Bucket) -> Callable[[], None] | None:
        """What is left to do when this micro-batch's reduction is through, be that in a later one."""
        adds = self._is_added(bucket)
        if not self._buffers.beside or (self._shards > 1 and not adds):
            return None
        total, own = self.reduced(bucket), self.own(bucket, self.whole(bucket))

        def store() -> None:
            with torch.no_grad():
                if adds:
                    total.add_(own)
                else:
                    total.copy_(own)

        return store

    def _is_added(self, bucket: Bucket) -> bool:
        return self._each and bucket.name in self._adds

    # ---- after it

    def publish(self, used: Iterable[int], keep: bool) -> None:
        """Makes the step's reduced gradients the parameters' `grad`.

        Args:
            used: Parameters that any rank has a gradient for; the others get None, which an optimizer skips.
            keep: Whether this rank holds the reduced gradients (with a parameter server, only rank 0 does).
        """
        chosen = set(used) if keep else set()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in self.trainable:
                carried, place = self._carried.get(index), self._reduced_of(index)
                if place is None or not (index in chosen or (keep and carried is not None)):
                    self._all[index].grad = None
                    continue
                place = self._shown_reduced(index, place)
                if carried is not None:
                    place = place.to(carried.dtype).add_(carried) if index in chosen else carried
                self._give(index, place, None)
        self._carried.clear()
        self._used_before = chosen if self._each else set()

    def publish_sums(self) -> None:
        """Makes the sums so far the parameters' `grad`, which waits for their reductions when it is looked at."""
        self._used_before |= self.used
        for index in self.trainable:
            place, bucket = self._reduced_of(index), self._bucket_of[index]
            if place is None:
                self._all[index].grad = None
            else:
                self._give(index, self._shown_reduced(index, place), partial(self._wait, bucket))

    def _give(self, index: int, gradient: Tensor, wait: Callable[[], None] | None) -> None:
        """Makes a tensor of any dtype and shape a parameter's `grad`."""
        local = self._parameters.local(index)
        if local is not None and wait is None:
            # Widened first: many backward passes before a step must not add up in low precision.
            gradient = gradient.to(local.dtype)
        if self._shards > 1 or wait is not None:
            gradient = as_shard(gradient, wait, self._shards > 1)
        set_gradient(self._all[index], gradient)

    def end_local(self) -> None:
        """Ends a backward whose gradients stay on this rank: each is where the next one adds to it."""
        if self._low:
            with torch.no_grad():
                for index in self.late():
                    gradient = self._all[index].grad
                    assert gradient is not None
                    self._whole[index].add_(gradient)
                for index in self._filled:
                    set_gradient(self._all[index], self._shown_whole(index))

    def _shown_whole(self, index: int) -> Tensor:
        bucket = self._bucket_of[index]
        return self._handed_out.view(f"{bucket.name}, whole", self.whole(bucket), self._whole[index])

    def _shown_reduced(self, index: int, place: Tensor) -> Tensor:
        bucket = self._bucket_of[index]
        return self._handed_out.view(f"{bucket.name}, reduced", self.reduced(bucket), place)

    def _reduced_of(self, index: int) -> Tensor | None:
        """The reduced gradient of a parameter, of this rank's shard where it has one; None where that is empty."""
        slot, bucket = self._layout.slots[index], self._bucket_of[index]
        reduced = self.reduced(bucket)
        if self._shards == 1:
            return parameter_in(reduced, slot, bucket.start)
        start, stop = self._layout.shard_of(bucket, index, self._index, self._shards)
        first = bucket.shard(self._index, self._shards)[0]
        return reduced[start - first : stop - first] if start < stop else None

    def square_sum(self) -> Tensor:
        """Sum of the squares of this rank's reduced gradients: fp64, 0-dim."""
        return square_sum([found for index in self.trainable if (found := self._reduced_of(index)) is not None])

    @property
    def carries(self) -> bool:
        """Whether gradients from before this step will be added to the reduced ones."""
        return bool(self._carried)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements: fp64, 0-dim, summed in fp32 where they are of lower precision."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    with torch._C.DisableTorchFunctionSubclass():
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([tensor for tensor in tensors if tensor.dtype == dtype], 2, wide)
            total = total + torch.stack(norms).double().square().sum()
    return total
