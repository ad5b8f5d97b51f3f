"""A rank's parameters through a step: unsharded to compute with, this rank's shards to update, at rest in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.buffers.conversions import Conversions
from paceline.buffers.edits import CopyEdits, Edits, StateEdits, refuse_edit
from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.memory import Tensors, placeholder
from paceline.buffers.pinned import Pinned
from paceline.buffers.put_in_place import put_back, take_given
from paceline.buffers.unsharded import Unsharded
from paceline.core.layout import Bucket
from paceline.core.schedule import Schedule
from paceline.hooks.parameters import follow_accumulators
from paceline.tensors.sharded_parameter import Owner, guard, own, show, unguard
from paceline.tensors.transforms import follow_transforms


class Parameters:
    """The `data` of the user's parameter objects through a step: whole, this rank's shard, or a placeholder.

    A parameter's shape and dtype are always those that it is computed with; only inside `optimizer.step()` is its data
    this rank's shard, as it is updated. Where it is not there to compute with (sharded at zero 3, or an update of it
    still on its way), its class asks the engine first: see `sharded_parameter`.

    Attributes:
        flat: Where they lie.
        all: In the order of the layout's slots.
        unsharded: Which sharded units lie gathered where.
        waiting: Names of the buckets whose update is still on its way from the ranks that made it.
        conversions: Which parameters are of another dtype than they are laid out in.
        are_local: Whether they are this rank's shards, for an optimizer.
        are_touched: Whether a loop has ever used parameters between steps: it may have their memory, as `p.data`.
        pinned: Sharded parameters that were used outside their unit: whole until the next forward or update.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        tensors: Tensors,
        owner: Owner,
        turns: Iterable[Iterable[nn.Parameter]] | None = None,
    ) -> None:
        """Moves parameters into flat buffers. A collective call where peers reach these.

        Args:
            schedule: Gives layout, buffers and slots.
            parameters: In the order of `layout.slots`.
            device: Where the buffers live.
            tensors: Allocates the buffers.
            owner: Is asked before a sharded parameter is used.
            turns: Yields each parameter once, in groups that are whole until the next is asked for; by default all are
                whole already.
        """
        self.flat = flat = FlatParameters(schedule, parameters, device, tensors, turns)
        self.all, self.waiting = flat.all, set[str]()
        self.unsharded, self._kept = Unsharded(schedule), schedule.kept_buckets
        self.pinned = Pinned(flat)
        self.are_touched = self.are_local = False
        self._open, self._version = set[str](), 0
        # Where edits of what is computed with would not reach what is updated, or would reach other ranks.
        lost = flat.managed if self.loses_edits and not flat.is_sharded else []
        self._edits = Edits(self.all, {index: flat.own_part(index) for index in lost})
        self._copy_edits, self.conversions, self.state_edits = CopyEdits(flat), Conversions(flat), StateEdits(self.all)
        follow_transforms()
        for index in flat.managed:
            own(self.all[index], owner, index, flat.views[index].stride())
        self._placeholder = {index: placeholder(flat.views[index]) for index in flat.managed if flat.is_sharded}
        self.rest()
        flat.count_own_uses()

    def assign_slots(self, schedule: Schedule) -> None:
        """Gives gathered units their slots, which the order they run in decides."""
        self.flat.assign_slots(schedule)
        self.unsharded, self._kept = Unsharded(schedule), schedule.kept_buckets
        self._copy_edits = CopyEdits(self.flat)

    @property
    def made(self) -> tuple[Tensor, ...]:
        """All tensors over the parameters' memory that are kept here."""
        return (*self.flat.made, *self._copy_edits.made)

    # ---- what p.data is

    def unshard(self, units: Iterable[str]) -> None:
        """Lets the parameters of some units, which are here, be computed with."""
        for unit in units:
            if unit not in self._open:
                self._open.add(unit)
                self._present(self.flat.managed_of.get(unit, ()))

    def is_open(self, unit: str) -> bool:
        """Whether the parameters of a unit can be computed with."""
        return unit in self._open

    def reshard(self, units: Iterable[str]) -> None:
        """Ends computing with the parameters of some gathered units.

        Raises:
            EngineError: One was written to while it was gathered.
        """
        for unit in units:
            if unit in self._open:
                self._open.discard(unit)
                if (edited := self._copy_edits.sampled(unit)) is not None:
                    refuse_edit(edited, self.flat)
                self._hide(self.flat.managed_of.get(unit, ()))

    def _present(self, indices: Iterable[int]) -> None:
        shown = {index: self.all[index] for index in indices if index not in self.pinned.views}
        show(shown.values())
        if self.flat.is_sharded:
            views = self.flat.views
            for index, parameter in shown.items():
                parameter.data = views[index]
            self._set_versions(shown.values(), self._version)

    def _hide(self, indices: Iterable[int]) -> None:
        hidden = {index: self.all[index] for index in indices if index not in self.pinned.views}
        if (edited := next(filter(self._is_changed, hidden), None)) is not None:
            refuse_edit(edited, self.flat)
        for index, parameter in hidden.items():
            parameter.data = self._placeholder[index]
            guard(parameter)
        # A graph that still needs these values must not find others in their place.
        self._set_versions(hidden.values(), self._version + 1)

    def _is_changed(self, index: int) -> bool:
        """Whether a gathered parameter was written to in place, or given other data."""
        return self.all[index]._version != self._version or self._is_moved(index)

    def _is_moved(self, index: int) -> bool:
        """Whether a parameter was given other values elsewhere, and not only a copy, as routers that cast theirs do."""
        parameter, whole = self.all[index], self.pinned.views.get(index, self.flat.views[index])
        if parameter.data_ptr() == whole.data_ptr() or self.conversions.is_converted(index, whole.dtype):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return not torch.equal(parameter, whole)

    def _set_versions(self, parameters: Collection[Tensor], version: int) -> None:
        self.state_edits.forget()
        if parameters and self.flat.is_sharded:
            torch._C._autograd._unsafe_set_version_counter(tuple(parameters), (version,) * len(parameters))

    def rest(self) -> None:
        """Lets all parameters be what they are outside of forward and backward, unedited as they are now."""
        self._open.clear()
        rests = {index: self.all[index] for index in self.flat.managed if index not in self.pinned.views}
        data = self._placeholder if self.flat.is_sharded else self.flat.views
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in rests.items():
                parameter.data = data[index]
        self.are_local = False
        if self.loses_edits or self.waiting:
            for parameter in rests.values():
                guard(parameter)
        else:
            show(rests.values())
        if self.flat.has_masters:
            follow_accumulators(self.all)
        self._set_versions(rests.values(), self._version + 1)
        self._edits.set()
        self._copy_edits.set()

    def arrived(self, buckets: Iterable[str]) -> None:
        """The updates of some buckets are here.

        Raises:
            EngineError: Parameters no longer are where these came to.
        """
        self.flat.require_in_place()
        self.waiting.difference_update(buckets)

    def pin(self, index: int, gather: Callable[[Bucket, Tensor], None]) -> None:
        """Makes a sharded parameter whole in memory of its own, until `unpin`: see `Pinned.gather`."""
        indices = self.pinned.gather(index, gather)
        for each in indices:
            unguard(self.all[each])
            self.all[each].data = self.pinned.views[each]
        self._set_versions([self.all[each] for each in indices], self._version)

    def unpin(self) -> None:
        """Hides what `pin` made whole.

        Raises:
            EngineError: One was written to meanwhile, or given other data.
        """
        if not self.pinned.views:
            return
        if (edited := self._copy_edits.found(self.pinned.copies)) is None:
            edited = next(filter(self._is_moved, self.pinned.views), None)
        if edited is not None:
            refuse_edit(edited, self.flat)
        indices = [*self.pinned.views]
        self.pinned.clear()
        closed = [index for index in indices if not self.is_open(self.flat.layout.slots[index].spec.unit)]
        self._present([index for index in indices if index not in closed])
        for index in closed:
            self.all[index].data = self.flat.views[index]
        self._hide(closed)

    def drop_pins(self) -> None:
        """Forgets what `pin` made whole, in any state that it is in: all parameters rest."""
        self.pinned.clear()
        self.rest()

    # ---- updates

    def show_local(self) -> None:
        """Lets parameters be this rank's shards as they are updated, for an optimizer.

        Raises:
            EngineError: A parameter was edited where that would be lost.
        """
        self.unpin()
        self.take_given()
        self.are_local = True
        for index in self.flat.managed:
            unguard(parameter := self.all[index])
            if not self.flat.is_sharded and self.loses_edits and self._is_moved(index):
                refuse_edit(index, self.flat)
            if self.flat.layout.slots[index].spec.trainable:
                parameter.data = self.flat.local[index]

    def take_given(self, writes_over: bool = False) -> None:
        """Takes values of parameters that a loop gave other data outside of `full`, where that counts: see there."""
        if not self.loses_edits:
            take_given(self.flat, writes_over)

    def updated(self) -> None:
        """The masters have changed: what was gathered is stale, and what is computed with follows them."""
        self.unsharded.forget()
        self._version += 2
        self.flat.round_masters()

    def require_unedited(self, wholly: bool = True) -> None:
        """Refuses to go on with parameters that somebody else changed where that would be lost.

        Args:
            wholly: Whether all elements are looked at, and not a few, of rounded masters that were touched.

        Raises:
            EngineError: A parameter was edited since `rest`, converted to another dtype or given another shape.
        """
        self.conversions.require_none()
        self.flat.require_shapes()
        self.narrow()
        self.flat.require_in_place()
        self.flat.former.require_unedited(self.all)
        edited = self.state_edits.found()
        if edited is None:
            edited = self._edited_while_open() if self.flat.is_sharded else self._edits.found()
        if edited is None and self.loses_edits and not self.flat.is_sharded:
            with torch._C.DisableTorchFunctionSubclass():
                edited = next(filter(self._is_moved, self.flat.managed), None)
            if edited is None:
                put_back(self.flat)
            if edited is None and wholly and self.are_touched:
                edited = self._copy_edits.in_rounded()
        if edited is not None:
            refuse_edit(edited, self.flat)

    def narrow(self) -> None:
        """Parameters that were made as wide as they are updated outside of that are computed with as ever."""
        if self.conversions.undo():
            follow_accumulators(self.all)

    def _edited_while_open(self) -> int | None:
        """The index of a gathered parameter that no longer is what its shards are; None where there is none."""
        for unit in self._open:
            indices = self.flat.managed_of.get(unit, ())
            changed = (index for index in indices if index not in self.pinned.views and self._is_changed(index))
            if (edited := next(changed, self._copy_edits.sampled(unit))) is not None:
                return edited
        kept = {b.name: self.flat.whole(b) for b in self._kept if self._open.issuperset(b.units)}  # small ones
        return self._copy_edits.found({name: whole for name, whole in kept.items() if not whole.is_cuda})

    @property
    def loses_edits(self) -> bool:
        """Whether what is written to parameters outside of `full` does not reach what is updated."""
        return self.flat.is_sharded or self.flat.shares_memory or self.flat.has_masters

    # ---- gathering

    def begin_gather(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """A gather of a bucket begins: returns what it fills, and this rank's shard where that is not part of it."""
        if not self.flat.is_sharded:
            return self.flat.whole(bucket), None
        displaced = self.unsharded.begin(bucket)
        if displaced is not None:
            # Such as in a checkpoint around several units, which computes them all again before the first backward.
            self.reshard((displaced,))
        return self.flat.whole(bucket), self.flat.shard(bucket)
