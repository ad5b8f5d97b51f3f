"""Whole parameters as they are updated, gathered from flat buffers for a while, and written back to these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from paceline.buffers.conversions import refuse_conversion
from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.lent import Lent
from paceline.buffers.memory import parameter_in
from paceline.buffers.put_in_place import note_given
from paceline.buffers.storage_uses import storage_of, used_elsewhere, uses_of
from paceline.core.buffers import has_master
from paceline.core.layout import Bucket
from paceline.tensors.sharded_parameter import unguard
from paceline.tensors.stale_view import become_stale, views_of

Gather = Callable[[Tensor, Tensor, str], None]
"""(buffer, this rank's shard, label): fills the buffer from all shards; a collective call."""


class WholeParameters:
    """All parameters of a model whole, in memory of their own where the flat buffers have them otherwise."""

    def __init__(self, flat: FlatParameters, gather: Gather | None, edits: bool, is_state: bool) -> None:
        """Gathers them. A collective call where they are sharded.

        Args:
            flat: The model's.
            gather: Performs an all-gather; None with one rank.
            edits: Whether they may be written to, so that this rank needs a copy of what others share with it.
            is_state: Whether they are only saved or loaded. What is gathered to be saved lies in the host's memory then
                at zero 3, whose whole model a device may not hold. If not, frozen parameters, of which only rounded
                values are left, are in the dtype that they had, so that the others' masters can be computed with
                beside them.
        """
        self._flat, self._is_state = flat, is_state
        on_host = is_state and not edits and flat.is_sharded
        self._buckets: dict[str, Tensor] = {}
        self._rounded: dict[int, Tensor] = {}
        self._widened: dict[int, Tensor] = {}
        self._own_uses = 0
        with torch.no_grad():
            if gather is not None:
                for bucket, whole in gathered(flat, gather, None if is_state else flat.former.lent):
                    # One bucket at a time on the device.
                    self._buckets[bucket.name] = whole.cpu() if on_host else whole
            for bucket in flat.layout.buckets:
                if bucket.name in self._buckets:
                    continue
                if self._is_master(bucket):
                    self._buckets[bucket.name] = flat.master(bucket)
                elif flat.shares_memory and edits:
                    whole, lent = flat.whole(bucket), None if is_state else flat.former.lent.memory(bucket.name)
                    self._buckets[bucket.name] = whole.clone() if lent is None else lent.copy_(whole)
            for index, slot in enumerate(() if is_state else flat.layout.slots):
                if not slot.spec.trainable and slot.spec.dtype != flat.layout.flats[slot.flat].dtype:
                    # That of one that nobody moves may be the loop's own by now.
                    self._rounded[index] = self._view(index) if index in flat.local else flat.all[index].data
                    self._widened[index] = self._rounded[index].to(getattr(torch, slot.spec.dtype))

    def _view(self, index: int) -> Tensor:
        flat, bucket = self._flat, self._flat.bucket_of.get(index)
        if bucket is None or (whole := self._buckets.get(bucket.name)) is None:
            return flat.views[index]
        return parameter_in(whole, flat.layout.slots[index], bucket.start)

    def show(self) -> dict[int, Tensor]:
        """Makes them the data of the user's parameters; returns that of those that it changes, by index."""
        for index in self._flat.managed:
            unguard(self._flat.all[index])
        shown = {index: self._view(index) for index in self._flat.managed} | self._widened
        for index, data in shown.items():
            self._flat.all[index].data = data
        self._own_uses = self._uses()
        return shown

    def part_views(self) -> None:
        """Parts views with a graph that somebody keeps from the parameters, which are about to be elsewhere."""
        if not self._is_state and self._uses() > self._own_uses:
            memory = {storage_of(whole) for whole in self._buckets.values()}
            for index, view in views_of({index: self._flat.all[index] for index in self._flat.managed}):
                if storage_of(view) in memory:
                    become_stale(view, self._flat.layout.slots[index].spec.name, "inside pl.full_parameters")

    def _uses(self) -> int:
        return sum(map(uses_of, self._buckets.values()))

    def narrow(self, edits: bool) -> None:
        """Rounds frozen parameters again, to what they have become where that is kept."""
        for index, rounded in self._rounded.items():
            data = self._flat.all[index].data
            self._flat.all[index].data = rounded.copy_(data) if edits else rounded

    def lend(self, shown: Mapping[int, Tensor]) -> None:
        """Parameters are elsewhere again: notes what a loop keeps of the memory that they were in.

        Args:
            shown: What `show` gave.
        """
        if self._is_state:
            return
        masters = {b.name for b in self._flat.layout.buckets if self._is_master(b)}
        memory = {name: whole for name, whole in self._buckets.items() if name not in masters}
        self._flat.former.lent.keep(used_elsewhere(memory, known=shown.values()))

    def _is_master(self, bucket: Bucket) -> bool:
        """Whether a bucket is whole on this rank as it is updated, so that nothing is gathered."""
        return has_master(self._flat.layout.flats[bucket.flat]) and not is_gathered(self._flat, bucket)

    def keep(self) -> None:
        """Writes what the user's parameters have become to the flat buffers, also where they were given other data.

        Raises:
            EngineError: One was given another shape, or converted to another dtype.
        """
        flat = self._flat
        for index in flat.managed:
            flat.layout.slots[index].spec.require_shape(flat.all[index].shape)
            if flat.all[index].dtype != self._view(index).dtype:
                refuse_conversion(index, flat)
        with torch.no_grad():
            given = [index for index in flat.managed if flat.all[index].data_ptr() != self._view(index).data_ptr()]
            for index in given:
                self._view(index).copy_(flat.all[index].data)
            note_given(flat, given)
            for bucket in flat.layout.buckets:
                if (whole := self._buckets.get(bucket.name)) is not None:
                    size = bucket.numel // flat.shards
                    if flat.shards > 1:
                        flat.master(bucket).copy_(whole[flat.shard_index * size : (flat.shard_index + 1) * size])
                    if not flat.is_sharded and not flat.shares_memory:
                        flat.whole(bucket).copy_(whole)


def gathered(flat: FlatParameters, gather: Gather, lent: Lent | None = None) -> Iterator[tuple[Bucket, Tensor]]:
    """Each bucket that no rank has whole as it is updated, on every rank. Collective calls.

    Args:
        flat: The model's.
        gather: Performs an all-gather.
        lent: What a loop has kept of the last time, which is filled again.
    """
    for bucket in flat.layout.buckets:
        if is_gathered(flat, bucket):
            master = flat.master(bucket)
            whole = lent.memory(bucket.name) if lent is not None else None
            if whole is None:
                whole = torch.empty(bucket.numel, dtype=master.dtype, device=flat.device)
            gather(whole, master, bucket.name)
            yield bucket, whole


def is_gathered(flat: FlatParameters, bucket: Bucket) -> bool:
    """Whether no rank has a bucket whole as it is updated."""
    return flat.is_sharded or (has_master(flat.layout.flats[bucket.flat]) and flat.shards > 1)
