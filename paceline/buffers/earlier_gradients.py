"""Gradients in `p.grad` when a backward begins, and the form in which that backward adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.held_gradients import HeldGradients
from paceline.buffers.storage_uses import storage_of
from paceline.core.layout import Bucket
from paceline.tensors.assigned_gradient import gradient_of, set_gradient
from paceline.tensors.gradient_shard import GradientShard, become_whole, division_of, require_own


class EarlierGradients:
    """Gradients from before the backward under way.

    What is reduced already becomes a rank's share of itself again when a later backward adds to it, such that the next
    reduction gives what it was plus what has come.

    Attributes:
        flat: Where gradients lie.
        carried: What is added to a parameter's reduced gradient when that is published, by index.
        filled: Indices of parameters whose whole gradient holds something already.
        used: Those that have a gradient on this rank that what was reduced before holds.
        held_gradients: The tensors that `p.grad` held, to end in.
    """

    def __init__(self, flat: FlatGradients, parameters: FlatParameters, wait: Callable[[Bucket], None]) -> None:
        """There are none yet.

        Args:
            flat: See above.
            parameters: Of the same layout.
            wait: Waits for the reductions of a bucket that are under way.
        """
        self._wait = wait
        self.replace(flat, parameters)
        schedule = flat.schedule
        self._shards, self._replicas, self._low = schedule.shards, schedule.replicas, schedule.strategy.low
        self._means = schedule.strategy.gradients == "mean"
        # What a rank's share of a reduced gradient must be so that the sum over ranks gives it again.
        self._share = (schedule.world_size if self._means else 1) / schedule.holders
        self.carried: dict[int, Tensor] = {}
        self.filled: set[int] = set()
        self.used: set[int] = set()
        self._for_next_reduction: dict[int, Tensor] = {}
        self.held_gradients = HeldGradients()

    def replace(self, flat: FlatGradients, parameters: FlatParameters) -> None:
        """Parameters and gradients lie elsewhere from now on."""
        self.flat, self._parameters, self._all = flat, parameters, parameters.all

    def begin(self, alone: bool, reduced: bool) -> None:
        """A backward begins: what `p.grad` holds becomes what its gradients are added to.

        Args:
            alone: Whether this backward is its step's first and last.
            reduced: Whether what `p.grad` holds has been reduced already.
        """
        flat = self.flat
        self.filled.clear()
        self.carried.clear()
        flat.adds.clear()
        gradients = self._present()
        self._take_out(gradients)
        with_gradient = list(gradients)
        if flat.release(gradients.values()):
            for bucket in flat.buckets:
                self._wait(bucket)
            flat.take_other_memory()
        self.held_gradients.begin(flat, gradients)
        if flat.each:
            own = [i for i in with_gradient if (reduced and not self._is_whole(i)) or self._is_shard(i)]
            # Those whose `grad` the loop itself has made are new.
            made = {index for index in own if not self._is_shard(index)}
            self.used = set(own) & (self.used | made)
            self._carry(own, alone, reduced)
        elif reduced and (self._shards > 1 or self._share != 1):
            self._share_out(with_gradient)
        elif self._low:
            self._take_aside(with_gradient)
        for index, gradient in self._for_next_reduction.items():
            if index in with_gradient:
                self._all[index].grad = gradient
        self._for_next_reduction.clear()

    def _present(self) -> dict[int, Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            present = ((index, gradient_of(self._all[index])) for index in self.flat.trainable)
            return {index: gradient for index, gradient in present if gradient is not None}

    def _take_out(self, gradients: dict[int, Tensor]) -> None:
        """Gives gradients memory of their own that lie in another parameter's place, which is about to be written."""
        if not gradients:
            return
        ours = self.flat.handed_out()
        for index, gradient in gradients.items():
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                if gradient.layout != torch.strided or not gradient.numel():
                    continue
                own = (self.flat.views[index], self.flat.reduced_of(index))
                is_own = any(gradient.data_ptr() == place.data_ptr() for place in own)
                if is_own or storage_of(gradient) not in ours:
                    continue
            with torch.no_grad():
                gradients[index] = gradient.clone()
                set_gradient(self._all[index], gradients[index])

    def keep_for_next_reduction(self, indices: Iterable[int]) -> None:
        """Keeps gradients that came after their copy-in for the next reduction of the step."""
        for index in indices:
            gradient = self._all[index].grad
            assert gradient is not None
            self._for_next_reduction[index] = gradient
            self._all[index].grad = None

    def forget(self) -> None:
        """Forgets what a step that is given up has left."""
        self._for_next_reduction.clear()
        self.used.clear()
        self.carried.clear()
        self.held_gradients.forget()

    def _carry(self, with_gradient: Sequence[int], alone: bool, reduced: bool) -> None:
        """Where every micro-batch is reduced: keeps what `p.grad` holds where the next reductions are added."""
        with torch.no_grad():
            if alone:
                # What was there is added when its sum is published.
                self.carried = {index: self._reduced_part(index).clone() for index in with_gradient}
            else:
                present = set(with_gradient)
                for bucket in self.flat.buckets:
                    if not present.isdisjoint(bucket.slots):
                        self.flat.adds.add(bucket.name)
                        self._restore(bucket, present, reduced)
        for index in with_gradient:
            self._all[index].grad = None

    def _restore(self, bucket: Bucket, present: set[int], reduced: bool) -> None:
        """Puts what `p.grad` holds of a bucket back to where it was reduced to, if a loop changed it."""
        # Replicas will add it up among each other once more.
        factor = 1 / self._replicas if reduced and self._shards > 1 else 1.0
        for index in bucket.slots:
            place = self.flat.reduced_of(index)
            mine = self._reduced_part(index) if index in present else None
            if mine is not None and mine.data_ptr() == place.data_ptr() and factor == 1:
                continue
            self._wait(bucket)
            if mine is None:
                place.zero_()
            elif mine.data_ptr() != place.data_ptr():
                place.copy_(mine)
            if factor != 1:
                place.mul_(factor)

    def _share_out(self, with_gradient: Sequence[int]) -> None:
        """Makes reduced gradients this rank's share of themselves, whole."""
        with torch.no_grad():
            for index in with_gradient:
                gradient = self._all[index].grad
                assert gradient is not None
                if self._shards == 1 and not self._low and self.held_gradients.stays(index, gradient):
                    gradient.mul_(self._share)
                    continue
                whole = self.flat.views[index]
                if self._is_whole(index):
                    whole.copy_(gradient)
                else:
                    mine = self._reduced_part(index) * self._share
                    whole.zero_()
                    self.flat.own_part(index, whole).copy_(mine)
                self._all[index].grad = None
                if self._low:
                    self.filled.add(index)
                else:
                    self._all[index].grad = shown = self.flat.shown_whole(index)
                    self.held_gradients.replace(index, shown)

    def _take_aside(self, with_gradient: Sequence[int]) -> None:
        """In low precision: gradients add up in fp32 buffers, where autograd would add in what it computes in."""
        with torch.no_grad():
            for index in with_gradient:
                gradient, whole = self._all[index].grad, self.flat.views[index]
                assert gradient is not None
                if gradient.data_ptr() != whole.data_ptr():
                    whole.copy_(gradient)
                self._all[index].grad = None
                self.filled.add(index)

    def _is_shard(self, index: int) -> bool:
        return isinstance(self._all[index].grad, GradientShard)

    def _is_whole(self, index: int) -> bool:
        """Whether a loop has put a gradient there that is this rank's own share of a mean, as under DDP.

        Where all ranks have put the same, their mean is that. What has been published is a shard, and a tensor that was
        `p.grad` has not a number in place of other ranks' parts.
        """
        if not self._means or self._shards == 1 or self._is_shard(index):
            return False
        gradient = self._all[index].grad
        assert gradient is not None
        mine = self._parameters.cut(index, gradient).numel()
        return mine == gradient.numel() or int(gradient.isnan().sum()) < gradient.numel() - mine

    def _reduced_part(self, index: int) -> Tensor:
        """Returns the part of a parameter's `p.grad` that this rank keeps reduced."""
        gradient = self._all[index].grad
        assert gradient is not None
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(gradient, GradientShard):
                if self._shards > 1:
                    _require_own(gradient, self._parameters, index)
                return gradient.as_subclass(Tensor)
            return self._parameters.cut(index, gradient) if self._shards > 1 else gradient.detach()


def require_own_gradients(parameters: FlatParameters) -> None:
    """Makes gradients of other parameters whole, before any parameter becomes a shard: a collective call if some are.

    Raises:
        EngineError: There is one of another shape, or in other memory: see `require_own`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found = ((index, gradient_of(parameters.all[index])) for index in parameters.managed if parameters.shards > 1)
        shards = {index: gradient for index, gradient in found if isinstance(gradient, GradientShard)}
        become_whole([shard for index, shard in shards.items() if _is_anothers(shard, parameters, index)], "step")
        for index, shard in shards.items():
            if isinstance(shard, GradientShard):
                _require_own(shard, parameters, index)


def _is_anothers(gradient: GradientShard, parameters: FlatParameters, index: int) -> bool:
    division, own = division_of(gradient), parameters.division(index)
    return division not in (None, own) and division.shape == own.shape


def _require_own(gradient: GradientShard, parameters: FlatParameters, index: int) -> None:
    require_own(gradient, parameters.division(index), parameters.local[index].numel())
