"""Gradients between autograd and the flat buffers: copied in, reduced elsewhere, published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from paceline.buffers.earlier_gradients import EarlierGradients
from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.memory import Tensors, parameter_in
from paceline.buffers.parameters import Parameters
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule
from paceline.executor.gradient_norms import NormRecords
from paceline.tensors.assigned_gradient import assign_gradient, give_gradient, gradient_of, set_gradient
from paceline.tensors.division import WHOLE
from paceline.tensors.former_gradient import end_former
from paceline.tensors.gradient_shard import become_shard
from paceline.tensors.reduced_norm import ReducedNorm, norms_of


class Gradients:
    """Moves each parameter's gradient into its bucket and hands the reduced one back.

    Between two backward passes `p.grad` is all there is: what a loop scales, zeroes, replaces or drops there is what
    counts. It is one of

    - None;
    - this rank's share of a sum that is not reduced yet: a view of the whole gradients, which autograd adds to;
    - the reduced gradient, or this rank's shard of it (`GradientShard`).

    What is there when a backward begins, `earlier` makes what that adds to.

    Attributes:
        flat: Where they lie.
        earlier: Those from before the backward under way.
        synchronises: Whether this backward reduces the step's gradients.
        used: Those that have a gradient on this rank, in this step where it is not dropped in between.
        published: Where in memory each gradient lies that was published last.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Parameters,
        tensors: Tensors,
        wait: Callable[[Bucket], None],
        norms: NormRecords,
    ) -> None:
        """Allocates the buffers. A collective call where ranks communicate.

        Args:
            schedule: Gives layout, buffers and slots.
            parameters: Of the same layout.
            tensors: Allocates the buffers.
            wait: Waits for the reductions of a bucket that are under way.
            norms: Takes norms of gradients where it is asked to.
        """
        self._parameters, self._all, self._wait = parameters, parameters.all, wait
        self._norms = norms
        self._low = schedule.strategy.low
        self.flat = FlatGradients(schedule, tensors, 1)
        self.earlier = EarlierGradients(self.flat, parameters.flat, wait)
        self._copied: set[int] = set()
        self.published: dict[int, int] = {}
        self.synchronises = True
        self.used: set[int] = set()

    def replace(self, schedule: Schedule, parameters: Parameters, tensors: Tensors) -> None:
        """Allocates other buffers, between two steps, as units run in another order: see `__init__`."""
        self._parameters, self._all = parameters, parameters.all
        self.flat = FlatGradients(schedule, tensors, 2 if self.flat.sums else 1)
        self.earlier.replace(self.flat, parameters.flat)

    # ---- one backward

    def begin(self, micro_batch: int, synchronises: bool, reduced: bool) -> None:
        """Prepares for a backward.

        Args:
            micro_batch: Number within the step.
            synchronises: Whether gradients are reduced in it for the step.
            reduced: Whether what `p.grad` holds has been reduced already.
        """
        self.require_unedited()
        self.synchronises = synchronises
        self.used.clear()
        self._copied.clear()
        self._norms.begin(micro_batch)
        alone = micro_batch == 0 and synchronises
        if self.flat.schedule.strategy.reduces_every_micro_batch and not self.flat.sums and not alone:
            self.flat.sum_over_micro_batches()
        self.earlier.begin(alone, reduced)

    def require_unedited(self) -> None:
        """Refuses edits of tensors that were `p.grad` and are no longer: see `HeldGradients`."""
        self.earlier.held_gradients.require_unedited(self._all, self.flat.schedule.layout.slots)

    def copy_in(self, indices: Collection[int]) -> None:
        """Copies the gradients of some parameters into their buckets, zero where one has none."""
        views: list[Tensor] = []
        fresh: list[Tensor] = []
        added: list[tuple[Tensor, Tensor]] = []
        sends = self.synchronises or self.flat.each
        places, gaps, filled, used, low = self.flat.views, self.flat.gaps, self.earlier.filled, self.used, self._low
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index in indices:
                if (view := places.get(index)) is None:
                    continue
                parameter = self._all[index]
                gradient = gradient_of(parameter)
                if not sends and not low and self.earlier.held_gradients.stays(index, gradient):
                    used.add(index)
                    continue
                self._copied.add(index)
                if index in gaps:
                    gaps[index].zero_()
                if gradient is None:
                    if index in filled:
                        used.add(index)
                    elif sends:
                        view.zero_()
                    continue
                used.add(index)
                if gradient.requires_grad:
                    self.earlier.held_gradients.drop(index)
                if gradient.data_ptr() != view.data_ptr() or gradient.dtype != view.dtype:
                    if index in filled:
                        added.append((view, gradient))
                    else:
                        views.append(view)
                        fresh.append(gradient)
                if low:
                    filled.add(index)
                # Autograd must not add to memory that a collective reads: what comes after this lies apart.
                assign_gradient(parameter, None if sends or low else self.flat.shown_whole(index))
            if views:
                torch._foreach_copy_(views, fresh)
            for view, gradient in added:
                view.add_(gradient)
        if self._norms.is_on and sends:
            self._norms.add_local({index: self.flat.views[index] for index in indices if index in self.used})

    def note_after_copy_in(self, indices: Collection[int]) -> None:
        """Counts the parameters that `after_copy_in` gives as used, and leaves their norms out."""
        self.used.update(indices)
        self._norms.omit(indices)

    def after_copy_in(self) -> list[int]:
        """Returns the indices of parameters to whose gradient autograd has added after its copy-in."""
        with torch._C.DisableTorchFunctionSubclass():
            found = ((index, gradient_of(self._all[index])) for index in self._copied)
            views = self.flat.views
            return sorted(i for i, g in found if g is not None and g.data_ptr() != views[i].data_ptr())

    def copy_in_again(self, bucket: Bucket, indices: Collection[int], spare: Tensor) -> None:
        """Copies gradients that came after their copy-in, zero elsewhere, into memory like a bucket's."""
        spare.zero_()
        for index in set(indices) & set(bucket.slots):
            gradient = self._all[index].grad
            assert gradient is not None
            parameter_in(spare, self.flat.schedule.layout.slots[index], bucket.start).copy_(gradient)

    @property
    def used_in_step(self) -> set[int]:
        """Parameters that have a gradient on this rank that the step's reduced ones hold."""
        return self.used | self.earlier.used

    # ---- after it

    def publish(self, used: Iterable[int], keep: bool, norms: Mapping[int, ReducedNorm]) -> None:
        """Makes the step's reduced gradients the parameters' `grad`.

        Args:
            used: Parameters that any rank has a gradient for; the others get None, which an optimizer skips.
            keep: Whether this rank holds the reduced gradients.
            norms: Of the whole gradients, by index, where they are known and this rank has shards.
        """
        chosen = set(used) if keep else set()
        if self._norms.is_on:
            parts = {index: self.flat.reduced_of(index) for index in self.flat.trainable if index in chosen}
            self._norms.take_reduced({index: part for index, part in parts.items() if part.numel()})
        self.published.clear()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            carried = self.earlier.carried if keep else {}
            shown = self.flat.shown_reduced(index for index in self.flat.trainable if index in chosen)
            for index in self.flat.trainable:
                reduced, more = shown.get(index), carried.get(index)
                if more is not None:
                    reduced = more if reduced is None else reduced.to(more.dtype).add_(more)
                if reduced is not None:
                    self._give(index, reduced, None, norms.get(index))
                else:
                    assign_gradient(self._all[index], None)
                    self.earlier.held_gradients.replace(index, None)
        self.earlier.carried.clear()
        self.earlier.held_gradients.publish()
        self.earlier.used = chosen if self.flat.each else set()

    def _publish_sums(self) -> None:
        """Makes the sums so far the parameters' `grad`, which waits for their reductions when it is looked at."""
        self.earlier.used |= self.used
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, reduced in self.flat.shown_reduced(self.flat.trainable).items():
                self._give(index, reduced, partial(self._wait, self.flat.bucket_of[index]), None)

    def _give(self, index: int, gradient: Tensor, wait: Callable[[], None] | None, norm: ReducedNorm | None) -> None:
        """Makes a tensor of any dtype and shape a parameter's `grad`, in the tensor that was that before if it can."""
        local, sharded, sums = self._parameters.flat.local.get(index), self.flat.schedule.shards > 1, wait is not None
        # Widened: many backward passes before a step must not add up in low precision.
        dtype = gradient.dtype if local is None or sums else local.dtype
        held = self.earlier.held_gradients.to_give(index, gradient, dtype, sharded)
        if held is None:
            memory = gradient if gradient.dtype == dtype else gradient.to(dtype)
            gradient = give_gradient(self._all[index], memory, sharded or sums)
        else:
            end_former(held)
            if held.data_ptr() != gradient.data_ptr():
                if wait is not None:
                    # Who reads the loop's own tensor is not seen.
                    wait()
                    wait = None
                held.copy_(gradient)
            gradient = held
        if sharded or sums:
            become_shard(gradient, wait, self._parameters.flat.division(index) if sharded else WHOLE, norm)
        elif held is not None:
            gradient.__class__ = Tensor
        if held is not None:
            set_gradient(self._all[index], gradient)
        self.earlier.held_gradients.replace(index, gradient)
        if not sums:
            self.published[index] = gradient.data_ptr()

    def end_local(self) -> None:
        """Ends a backward that is not its step's last: each gradient is where the next one adds to it."""
        if self.flat.each:
            self.earlier.keep_for_next_reduction(self.after_copy_in())
            self._publish_sums()
            return
        if self._low:
            with torch.no_grad():
                for index in self.after_copy_in():
                    gradient = self._all[index].grad
                    assert gradient is not None
                    self.flat.views[index].add_(gradient)
                held, is_whole = self.earlier.held_gradients, self.flat.schedule.shards == 1
                for index in self.earlier.filled:  # This rank's share of a sum, which is as wide as the master.
                    shown = self.flat.shown_whole(index)
                    if is_whole and (kept := held.to_give(index, shown, shown.dtype, False)) is not None:
                        shown = kept.copy_(shown)
                    set_gradient(self._all[index], shown)
                    held.replace(index, shown)

    def own_norms(self) -> Tensor:
        """2-norms of this rank's shards of what gradients become: (trainable parameters,), fp64; none if it has all."""
        shown = self.flat.trainable if self.flat.schedule.shards > 1 else ()
        parts, carried = {index: self.flat.reduced_of(index) for index in shown}, self.earlier.carried
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            # Added as they are when they are published.
            parts.update(
                (index, parts[index].to(carried[index].dtype) + carried[index])
                for index in parts.keys() & carried.keys()
            )
        return norms_of(list(parts.values()), self._parameters.flat.device)
