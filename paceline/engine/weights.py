"""Parameters of one rank: whole to compute with, and this rank's pieces of them to update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.engine.gathered import Gathered
from paceline.engine.progress import EngineError
from paceline.engine.seal import Seal
from paceline.layout import Bucket, Layout, Slot
from paceline.schedule import Schedule

Allocate = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) -> a zeroed flat buffer that peers can be sent from; a collective call."""


def alone_on(device: torch.device) -> Allocate:
    """Allocates what this rank keeps for itself."""
    return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)


Gather = Callable[[Tensor, Tensor, str], None]
"""(buffer, this rank's shard, label): fills the buffer from all shards; a collective call."""


class Weights:
    """Flat buffers of parameters, and the views that `p.data` is given.

    A parameter object stays the user's own; only its data changes. Where it is updated in pieces (sharded, or in
    another precision), its data is this rank's piece of the master between steps, and the whole while it computes.
    Before the first step it has the parameter's own shape, so that optimizers may be made by looking at shapes; what
    is not there then reads as NaN and cannot be written.

    Attributes:
        parameters: In the order of `layout.slots`.
        swapped: Indices of the slots whose data changes between whole and piece.
        layout: Where they lie.
        buckets: By name.
        contents: Which parameters a bucket holds, in words, by its name.
        gathered: Where sharded units are gathered.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        allocate: Allocate,
        allocate_whole: Allocate,
    ) -> None:
        """Moves parameters into flat buffers. A collective call where `allocate` is.

        Args:
            schedule: Gives layout, sharding and places.
            parameters: In the order of `layout.slots`, whole.
            device: Where the buffers live.
            allocate: For what is communicated.
            allocate_whole: For what is computed with, where it is kept whole.
        """
        self.parameters = list(parameters)
        self._device = device
        self._shards, self._index = schedule.shards, schedule.rank % schedule.shards
        self.layout = layout = schedule.layout
        self.buckets = {bucket.name: bucket for bucket in layout.buckets}
        self.contents = {bucket.name: _contents(bucket, layout) for bucket in layout.buckets}
        self._sharded = schedule.gathers_units
        self._shared = schedule.shares
        self._low = schedule.strategy.low
        self._flats: list[Tensor] = []
        self._masters: list[Tensor | None] = []
        for flat in layout.flats:
            dtype, size = getattr(torch, flat.dtype), flat.numel // self._shards
            self._flats.append(allocate(size, dtype) if self._sharded else allocate_whole(flat.numel, dtype))
            own_master = flat.master != flat.dtype
            self._masters.append(allocate(size, getattr(torch, flat.master)) if own_master else None)
        self._bucket_of = {index: bucket for bucket in layout.buckets for index in bucket.slots}
        with torch.no_grad():
            self._fill()
        self._pieces = [self._piece(index) for index in range(len(layout.slots))]
        self.swapped = [index for index, piece in enumerate(self._pieces) if piece is not None]
        self._swapped_of: dict[str, list[int]] = {}
        for index in self.swapped:
            self._swapped_of.setdefault(layout.slots[index].spec.unit, []).append(index)
        self._whole: list[Tensor] = []
        self._open: set[str] = set()
        self.assign_places(schedule)
        for parameter, whole in zip(self.parameters, self._whole, strict=True):
            parameter.data = whole
        # What a parameter's data is when nothing computes with it.
        self._resting = {index: self._shape_alone(index) for index in self.swapped}
        pieces = {index: piece for index, piece in enumerate(self._pieces) if piece is not None}
        self._seal = Seal(self.parameters, pieces)

    # ---- buffers

    def whole(self, bucket: Bucket) -> Tensor:
        """All parameters of a bucket, flat, to compute with."""
        if not self._sharded:
            return self._flats[bucket.flat][bucket.start : bucket.stop]
        return self.gathered.whole[bucket.name]

    def shard(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, in the dtype that is computed with."""
        if not self._sharded:
            return self._flats[bucket.flat][slice(*bucket.shard(self._index, self._shards))]
        return self._flats[bucket.flat][bucket.start // self._shards : bucket.stop // self._shards]

    def master(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a bucket's parameters, flat, as they are updated."""
        if (master := self._masters[bucket.flat]) is None:
            return self.shard(bucket)
        return master[bucket.start // self._shards : bucket.stop // self._shards]

    def assign_places(self, schedule: Schedule) -> None:
        """Gives gathered units their places, which the order they run in decides."""
        self.gathered = Gathered(schedule, [flat.dtype for flat in self._flats], self._device)
        self._whole = [self._whole_view(index) for index in range(len(self.layout.slots))]

    def _fill(self) -> None:
        for index, slot in enumerate(self.layout.slots):
            spec = slot.spec
            values = torch.empty_strided(spec.shape, spec.stride, dtype=self.parameters[index].dtype)
            values = values.copy_(self.parameters[index]).as_strided((spec.numel,), (1,))
            bucket = self._bucket_of.get(index)
            if not self._sharded or bucket is None:
                self._flats[slot.flat][slot.offset : slot.stop].copy_(values)
            if bucket is None:
                continue
            start, stop = self.layout.piece(bucket, index, self._index, self._shards)
            if start < stop and (self._sharded or self._masters[slot.flat] is not None):
                first = bucket.shard(self._index, self._shards)[0]
                for target in {id(t): t for t in (self.shard(bucket), self.master(bucket))}.values():
                    target[start - first : stop - first].copy_(values[start - slot.offset : stop - slot.offset])

    def _piece(self, index: int) -> Tensor | None:
        """What a parameter's data is between steps; None where that is its whole."""
        slot, bucket = self.layout.slots[index], self._bucket_of.get(index)
        if bucket is None or not (self._shards > 1 or self._masters[slot.flat] is not None):
            return None
        if self._shards == 1:
            return _view(self.master(bucket), slot, bucket)
        start, stop = self.layout.piece(bucket, index, self._index, self._shards)
        first = bucket.shard(self._index, self._shards)[0]
        return self.master(bucket)[start - first : stop - first]

    def _shape_alone(self, index: int) -> Tensor:
        piece, whole = self._pieces[index], self._whole[index]
        assert piece is not None
        if self._shards == 1:
            return piece
        if not self._sharded and whole.dtype == piece.dtype:
            return whole
        return torch.full((), torch.nan, dtype=piece.dtype, device=self._device).expand(whole.shape)

    def _whole_view(self, index: int) -> Tensor:
        slot, bucket = self.layout.slots[index], self._bucket_of.get(index)
        if not self._sharded:
            return self._flats[slot.flat].as_strided(slot.spec.shape, slot.spec.stride, slot.offset)
        if bucket is None:
            # It has no elements.
            return torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=self._flats[slot.flat].dtype)
        return _view(self.whole(bucket), slot, bucket)

    # ---- what p.data is

    def show_whole(self, units: Iterable[str]) -> None:
        """Lets the parameters of some units be computed with."""
        for unit in units:
            if unit not in self._open:
                self._open.add(unit)
                for index in self._swapped_of.get(unit, ()):
                    self.parameters[index].data = self._whole[index]

    def let_go(self, units: Iterable[str]) -> None:
        """Lets the parameters of some units be what they are when nothing computes with them."""
        for unit in units:
            if unit in self._open:
                self._open.discard(unit)
                for index in self._swapped_of.get(unit, ()):
                    self.parameters[index].data = self._resting[index]

    def rest(self) -> None:
        """Lets all parameters be what they are when nothing computes with them."""
        for index, data in self._resting.items():
            self.parameters[index].data = data
        self._open.clear()

    def rest_in_pieces(self) -> None:
        """Lets all parameters be pieces, from the first step on."""
        for index in self.swapped:
            self._resting[index] = self._pieces[index]  # type: ignore[assignment]
        self.rest()

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """The part of a tensor of a parameter's own shape that goes with this rank's piece of it."""
        piece, slot = self._pieces[index], self.layout.slots[index]
        assert piece is not None
        if self._shards == 1:
            return whole.to(piece.dtype)
        start, stop = self.layout.piece(self._bucket_of[index], index, self._index, self._shards)
        ordered = torch.empty_strided(slot.spec.shape, slot.spec.stride, dtype=piece.dtype, device=self._device)
        flat = ordered.copy_(whole).as_strided((slot.spec.numel,), (1,))
        return flat[start - slot.offset : stop - slot.offset].clone()

    def piece(self, index: int) -> Tensor | None:
        """This rank's piece of a parameter; None where it is not updated in pieces."""
        return self._pieces[index]

    def seal(self) -> None:
        """Takes the pieces as they are now for what an optimizer or the engine made of them."""
        self._seal.set()

    def require_sealed(self) -> None:
        """Refuses to go on with pieces that somebody else changed.

        Raises:
            EngineError: A parameter was edited or given other data since `seal`.
        """
        edited = self._seal.broken()
        for index in self.swapped if edited is None else ():
            rests = self.layout.slots[index].spec.unit not in self._open
            if rests and self.parameters[index].data_ptr() != self._resting[index].data_ptr():
                edited = index
                break
        if edited is not None:
            raise EngineError(
                f"{self.layout.slots[edited].spec.name} was edited, but this rank updates only its piece of it: "
                "edit parameters inside `with pl.full_parameters(model):`, on every rank, then step as usual"
            )

    @property
    def number(self) -> list[int]:
        """Which of how many shards is this rank's."""
        return [self._index, self._shards]

    @property
    def dtype_changes(self) -> bool:
        """Whether parameters are updated in another dtype than they are computed with in."""
        return any(master is not None for master in self._masters)

    def leave(self, gather: Gather | None) -> None:
        """Makes every parameter whole, as it is updated, for good. A collective call where they are sharded."""
        with self.full(gather):
            kept = [self.parameters[index].data for index in self.swapped]
        for index, data in zip(self.swapped, kept, strict=True):
            self.parameters[index].grad = None
            self.parameters[index].data = data

    # ---- gathering

    def gathering(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        """A gather of a bucket begins: returns what it fills, and this rank's shard where that is not part of it."""
        if not self._sharded:
            return self.whole(bucket), None
        self.gathered.begin(bucket)
        return self.whole(bucket), self.shard(bucket)

    def updated(self) -> None:
        """The masters have changed: what was gathered is stale, and what is computed with follows them."""
        self.gathered.forget()
        with torch.no_grad():
            for bucket in self.layout.buckets:
                if self._masters[bucket.flat] is not None:
                    self.shard(bucket).copy_(self.master(bucket))

    @contextmanager
    def full(self, gather: Gather | None, edits: bool = True) -> Iterator[None]:
        """All parameters whole and as they are updated; what is written to them is kept.

        Args:
            gather: Performs an all-gather; None with one rank.
            edits: Whether they may be written to, so that this rank needs a copy of what others share with it.
        """
        opened = set(self._open)
        wholes: dict[str, Tensor] = {}
        with torch.no_grad():
            for bucket in self.layout.buckets:
                master = self.master(bucket)
                if self._sharded or (self._masters[bucket.flat] is not None and self._shards > 1):
                    wholes[bucket.name] = torch.empty(bucket.numel, dtype=master.dtype, device=self._device)
                    assert gather is not None
                    gather(wholes[bucket.name], master, bucket.name)
                elif self._masters[bucket.flat] is not None:
                    wholes[bucket.name] = master
                elif self._shared and edits:
                    wholes[bucket.name] = self.whole(bucket).clone()
        for index in self.swapped:
            bucket = self._bucket_of[index]
            whole = wholes.get(bucket.name)
            view = self._whole[index] if whole is None else _view(whole, self.layout.slots[index], bucket)
            self.parameters[index].data = view
        try:
            yield
        finally:
            with torch.no_grad():
                for bucket in self.layout.buckets:
                    if (whole := wholes.get(bucket.name)) is not None:
                        size = bucket.numel // self._shards
                        if self._shards > 1:
                            self.master(bucket).copy_(whole[self._index * size : (self._index + 1) * size])
                        if not self._sharded and not self._shared:
                            self.whole(bucket).copy_(whole)
            if self._sharded or self._low:
                self.updated()
            self.rest()
            self.seal()
            self.show_whole(() if self._sharded else opened)


def _contents(bucket: Bucket, layout: Layout) -> str:
    names = [layout.slots[index].spec.name for index in bucket.slots]
    return f"{bucket.name} holds {' to '.join(dict.fromkeys((*names[:1], *names[-1:])))}"


def _view(flat: Tensor, slot: Slot, bucket: Bucket) -> Tensor:
    """A parameter inside a flat tensor that holds its bucket."""
    offset = flat.storage_offset() + slot.offset - bucket.start
    return flat.as_strided(slot.spec.shape, slot.spec.stride, offset)
