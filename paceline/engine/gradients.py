"""Gradients between autograd and the flat buffers: collected, reduced elsewhere, published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.engine.pieces import guard_pieces, mark_piece
from paceline.engine.weights import Allocate, Weights
from paceline.errors import UserError
from paceline.layout import Bucket
from paceline.schedule import Schedule


class Gradients:
    """Moves each parameter's gradient into its bucket and hands the reduced one back.

    Whole gradients lie in flat buffers, or where they rotate, in a few places that buckets use in turn. While a
    synchronised backward runs, `p.grad` is None once a unit is collected, so that a gradient arriving late lands
    beside the buffer and is seen, not added to memory that a collective is reading. Between steps `p.grad` is a view
    of the reduced gradient: of this rank's piece where the parameter is updated in pieces.

    Attributes:
        used: Indices of the parameters that have had a gradient on this rank in the step.
    """

    def __init__(self, schedule: Schedule, weights: Weights, allocate: Allocate, allocate_sums: Allocate) -> None:
        """Allocates the buffers.

        Args:
            schedule: Gives layout, sharding and places.
            weights: Of the same layout.
            allocate: For whole gradients, which are reduced; a collective call where `allocate` is.
            allocate_sums: For reduced shards, which replicas reduce among each other.
        """
        self._weights, self._layout = weights, schedule.layout
        self._shards, self._index = schedule.shards, schedule.rank % schedule.shards
        self._rotates, self._each = schedule.rotates, schedule.strategy.reduces_each
        self._low = schedule.strategy.low
        # Replicas reduce a shard where its own transport reaches it.
        self._beside = self._rotates or 1 < self._shards < schedule.world_size
        self._allocate_sums = allocate_sums
        self._buckets = schedule.reduced
        if self._shards > 1:
            guard_pieces()
        self._whole = self._allocate_whole(schedule, allocate)
        self._views: dict[int, Tensor] = {}
        self._bucket_of: dict[int, Bucket] = {}
        for bucket in self._buckets:
            flat = self._whole[bucket.name]
            for index in bucket.slots:
                slot = self._layout.slots[index]
                offset = flat.storage_offset() + slot.offset - bucket.start
                self._views[index] = flat.as_strided(slot.spec.shape, slot.spec.stride, offset)
                self._bucket_of[index] = bucket
        self._trainable = sorted(self._views)
        self._sums: dict[str, Tensor] = {}
        self._published: dict[int, Tensor] = {}
        self._carried: dict[int, Tensor] = {}
        self._collected: set[int] = set()
        self._filled: set[int] = set()
        self._micro_batch, self._synchronises = 0, True
        self.used: set[int] = set()

    def _allocate_whole(self, schedule: Schedule, allocate: Allocate) -> dict[str, Tensor]:
        """The whole gradients of each bucket."""
        dtypes = {flat.gradient for flat in self._layout.flats}
        if not self._rotates:
            flats = {
                index: allocate(flat.numel, getattr(torch, flat.gradient))
                for index, flat in enumerate(self._layout.flats)
                if flat.trainable
            }
            return {bucket.name: flats[bucket.flat][bucket.start : bucket.stop] for bucket in schedule.reduced}
        rooms: dict[tuple[int, str], Tensor] = {}
        placed = [(b, schedule.gradient_place[b.name], self._layout.flats[b.flat].gradient) for b in schedule.reduced]
        for place in sorted({place for _, place, _ in placed}):
            for dtype in sorted(dtypes):
                size = max((b.numel for b, p, d in placed if (p, d) == (place, dtype)), default=0)
                if size:
                    rooms[place, dtype] = allocate(size, getattr(torch, dtype))
        return {bucket.name: rooms[place, dtype][: bucket.numel] for bucket, place, dtype in placed}

    # ---- one backward

    def begin(self, micro_batch: int, synchronises: bool) -> None:
        """Prepares for the backward of a step's micro-batch.

        What `p.grad` holds before the first is already reduced (or the user's own) and is carried over, to be added
        after the reduction.
        """
        self._micro_batch, self._synchronises = micro_batch, synchronises
        self._collected.clear()
        if micro_batch == 0 or self._each:
            self._filled.clear()
        if micro_batch == 0 or self._keeps_views:
            self.used.clear()
        if micro_batch and self._keeps_views:
            self._drop_what_was_zeroed()
        if micro_batch:
            return
        self._carried.clear()
        for index in self._trainable:
            parameter = self._weights.parameters[index]
            if parameter.grad is not None:
                carried = parameter.grad.clone() if self.holds(index) else parameter.grad
                piece = self._weights.piece(index)
                if piece is not None and carried.shape != piece.shape:
                    carried = self._weights.cut(index, carried)
                self._carried[index] = carried
                parameter.grad = None

    @property
    def _keeps_views(self) -> bool:
        """Whether between micro-batches `p.grad` is the whole gradient in its buffer, for autograd to add to."""
        return not self._low and not self._each

    def holds(self, index: int) -> bool:
        """Whether `p.grad` is what was published, or lies in its buffer, be it under another tensor object."""
        gradient = self._weights.parameters[index].grad
        known = (self._published.get(index), self._views.get(index))
        return gradient is not None and any(v is not None and v.data_ptr() == gradient.data_ptr() for v in known)

    def end_local(self) -> None:
        """Ends a backward that does not synchronise: what was carried over stays to be seen, and to be zeroed."""
        for index, carried in self._carried.items():
            parameter = self._weights.parameters[index]
            if parameter.grad is None and parameter.shape == carried.shape and parameter.dtype == carried.dtype:
                parameter.grad = carried

    def _drop_what_was_zeroed(self) -> None:
        """`zero_grad` since the last backward also means what was carried over."""
        for index, carried in list(self._carried.items()):
            parameter = self._weights.parameters[index]
            if parameter.shape != carried.shape:
                continue
            if parameter.grad is None or not parameter.grad.any():
                del self._carried[index]
            if parameter.grad is carried:
                parameter.grad = None

    def collect(self, indices: Iterable[int]) -> None:
        """Takes the gradients of some parameters into their buckets, zero where one has none."""
        views: list[Tensor] = []
        fresh: list[Tensor] = []
        added: list[tuple[Tensor, Tensor]] = []
        reduces = self._synchronises or self._each
        with torch.no_grad():
            for index in indices:
                if (view := self._views.get(index)) is None:
                    continue
                parameter = self._weights.parameters[index]
                self._collected.add(index)
                gradient = parameter.grad
                if gradient is None:
                    if reduces and index not in self._filled:
                        view.zero_()
                    continue
                self.used.add(index)
                if gradient is not view:
                    if gradient.is_sparse:
                        raise UserError(
                            f"{self._layout.slots[index].spec.name} has a sparse gradient; flat buffers "
                            "hold dense ones: build the embedding with sparse=False"
                        )
                    if index in self._filled:
                        added.append((view, gradient))
                    else:
                        views.append(view)
                        fresh.append(gradient)
                if self._low:
                    # In fp32 buffers, micro-batches add up here and not in autograd.
                    self._filled.add(index)
                parameter.grad = view if self._keeps_views and not self._synchronises else None
            if views:
                torch._foreach_copy_(views, fresh)
            for view, gradient in added:
                view.add_(gradient)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has a gradient on this rank, so that no other rank need be asked."""
        return len(self.used) == len(self._trainable)

    def late(self) -> list[int]:
        """Parameters whose gradient arrived after they were collected."""
        return [i for i in self._trainable if i in self._collected and self._weights.parameters[i].grad is not None]

    # ---- reduction

    def whole(self, bucket: Bucket) -> Tensor:
        """The whole gradients of a bucket, flat."""
        return self._whole[bucket.name]

    def reduced(self, bucket: Bucket) -> Tensor:
        """This rank's shard of the step's reduced gradients of a bucket, flat."""
        beside = self._beside or self._sums_up
        return self._sums[bucket.name] if beside else self._own(bucket)

    def shard(self, bucket: Bucket) -> Tensor | None:
        """Where this micro-batch's reduced shard goes, if not into the whole gradients."""
        first = self._micro_batch == 0 or not self._each
        return self._sum(bucket) if self._shards > 1 and first and (self._beside or self._sums_up) else None

    def after_reduction(self, bucket: Bucket) -> Callable[[], None]:
        """What is left to do when this micro-batch's reduction is through, be that in a later one.

        Adds what it left in the whole gradients to the sum over micro-batches.
        """
        if not self._sums_up or (self._micro_batch == 0 and self._shards > 1):
            return lambda: None
        total, own, first = self._sum(bucket), self._own(bucket), self._micro_batch == 0

        def add() -> None:
            with torch.no_grad():
                if first:
                    total.copy_(own)
                else:
                    total.add_(own)

        return add

    def add_all_reduced(self) -> None:
        """What there is to do after each micro-batch where nothing has to be reduced."""
        for bucket in self._buckets:
            self.after_reduction(bucket)()

    @property
    def _sums_up(self) -> bool:
        """Whether reduced gradients are summed over micro-batches."""
        return self._each and (self._micro_batch > 0 or not self._synchronises)

    def own(self, bucket: Bucket, whole: Tensor) -> Tensor:
        """This rank's shard of a bucket's whole gradients, which a reduction in place leaves there."""
        size = bucket.numel // self._shards
        return whole[self._index * size : (self._index + 1) * size]

    def _own(self, bucket: Bucket) -> Tensor:
        return self.own(bucket, self._whole[bucket.name])

    def _sum(self, bucket: Bucket) -> Tensor:
        """The reduced shard over micro-batches, allocated when first asked for: in fp32 where several are summed."""
        flat = self._layout.flats[bucket.flat]
        dtype = getattr(torch, flat.master if self._sums_up else flat.gradient)
        found = self._sums.get(bucket.name)
        if found is None or (found.dtype != dtype and self._sums_up):
            wider = self._allocate_sums(bucket.numel // self._shards, dtype)
            if found is not None:
                wider.copy_(found)
            self._sums[bucket.name] = found = wider
        return found

    def allocate_sums(self) -> None:
        """Allocates what the reductions of this micro-batch need, as that may be a collective call."""
        for bucket in self._buckets:
            if self._sums_up or self.shard(bucket) is not None:
                self._sum(bucket)

    # ---- after it

    def publish(self, used: Iterable[int], keep: bool) -> None:
        """Makes the reduced gradients the parameters' `grad`, with what was carried added.

        Args:
            used: Parameters that any rank has a gradient for; the others get None, which an optimizer skips.
            keep: Whether this rank holds the reduced gradients (with a parameter server, only rank 0 does).
        """
        chosen = set(used) if keep else set()
        self._published.clear()
        with torch.no_grad():
            for index in self._trainable:
                parameter, carried = self._weights.parameters[index], self._carried.get(index)
                result = self.result(index)
                if result is None:
                    parameter.grad = None
                    continue
                if index in chosen or (keep and carried is not None):
                    # Widened first: many backward passes before a step must not add up in low precision.
                    self._published[index] = result = self._as_updated(index, result)
                    if carried is not None:
                        if index in chosen:
                            result.add_(carried)
                        else:
                            result.copy_(carried)
                    if self._shards > 1:
                        mark_piece(result)
                    parameter.grad = result
                else:
                    parameter.grad = None
        self._carried.clear()

    def result(self, index: int) -> Tensor | None:
        """The reduced gradient of a parameter, of this rank's piece where it has one; None where that is empty."""
        slot, bucket = self._layout.slots[index], self._bucket_of[index]
        reduced = self.reduced(bucket)
        if self._shards == 1:
            if not self._sums_up:
                return self._views[index]
            return reduced.as_strided(
                slot.spec.shape, slot.spec.stride, reduced.storage_offset() + slot.offset - bucket.start
            )
        start, stop = self._layout.piece(bucket, index, self._index, self._shards)
        first = bucket.shard(self._index, self._shards)[0]
        return reduced[start - first : stop - first] if start < stop else None

    def _as_updated(self, index: int, result: Tensor) -> Tensor:
        """The gradient in the dtype of the piece that an optimizer updates with it: where it is wider, a copy."""
        piece = self._weights.piece(index)
        return result if piece is None else result.to(piece.dtype)

    def forget_zeroed(self) -> None:
        """Lets go of copies that the user has dropped from `p.grad`, so that forward has their memory."""
        for index in [index for index in self._published if self._weights.parameters[index].grad is None]:
            del self._published[index]

    def square_sum(self) -> Tensor:
        """Sum of the squares of this rank's reduced gradients: fp64, 0-dim."""
        return square_sum([result for index in self._trainable if (result := self.result(index)) is not None])

    @property
    def carries(self) -> bool:
        """Whether gradients from before this step will be added to the reduced ones."""
        return bool(self._carried)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements: fp64, 0-dim, summed in fp32 where they are of lower precision."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch._foreach_norm([tensor for tensor in tensors if tensor.dtype == dtype], 2, wide)
        total = total + torch.stack(norms).double().square().sum()
    return total
