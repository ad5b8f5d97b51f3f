"""All parameters whole, for a while or for good: to be read, edited, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from paceline.buffers.flat_parameters import FlatParameters
from paceline.buffers.memory import parameter_in
from paceline.core.buffers import has_master
from paceline.core.layout import Bucket
from paceline.core.ops import READ, WRITTEN
from paceline.engine.parameters import Parameters
from paceline.engine.program import Program
from paceline.tensors.sharded_parameter import disown, unguard

Gather = Callable[[Tensor, Tensor, str], None]
"""(buffer, this rank's shard, label): fills the buffer from all shards; a collective call."""

_STATE_DICT = "model.state_dict()"


class FullParameters:
    """All parameters whole and as they are updated, while somebody reads, edits, saves or loads them.

    Attributes:
        is_full: Whether they are so now.
    """

    def __init__(self, program: Program, wait_for_updates: Callable[[], None]) -> None:
        """They are not.

        Args:
            program: The model's.
            wait_for_updates: Waits until every rank's update is here.
        """
        self._program, self._wait_for_updates = program, wait_for_updates
        self.is_full = False
        self._states: list[AbstractContextManager[None]] = []

    @property
    def takes_memory(self) -> bool:
        """Whether all parameters whole take memory beside what a rank holds of them."""
        return any(_is_gathered(self._program.parameters.flat, bucket) for bucket in self._program.layout.buckets)

    @contextmanager
    def full(self, call: str, edits: bool = True) -> Iterator[None]:
        """Lets every parameter be whole and as it is updated. A collective call where they are sharded.

        Args:
            call: What the user called, for messages.
            edits: Whether they may be written to. Where ranks share one copy, only that is a collective call.
        """
        program = self._program
        if self.is_full or not program.parameters.flat.managed:
            yield
            return
        self._wait_for_updates()
        program.parameters.require_unedited()
        self.is_full = True
        collectives = program.collectives
        shared_by = collectives if edits and program.schedule.shares_memory else None
        try:
            with full(program.parameters, partial(collectives.gather, call) if collectives else None, edits):
                try:
                    yield
                finally:
                    # What is written on leaving must not reach a rank that has yet to take its copy.
                    if shared_by is not None:
                        shared_by.barrier(READ)
        finally:
            self.is_full = False
        if shared_by is not None:
            shared_by.barrier(WRITTEN)

    def attend(self) -> None:
        """Takes part in another rank's `model.state_dict()`, a bucket at a time, and keeps nothing of it."""
        program = self._program
        if self.is_full or not program.parameters.flat.managed:
            return
        self._wait_for_updates()
        program.parameters.require_unedited()
        program.parameters.take_given()
        if program.collectives is not None:
            for _ in _gathered(program.parameters.flat, partial(program.collectives.gather, _STATE_DICT)):
                pass

    def open_states(self, edits: bool) -> None:
        """Enters `full`, until `close_state`."""
        self._states.append(self.full("model.load_state_dict()" if edits else _STATE_DICT, edits))
        self._states[-1].__enter__()

    def close_state(self) -> None:
        """Leaves what `open_states` entered last."""
        self._states.pop().__exit__(None, None, None)

    def close_states(self) -> None:
        """Leaves what a `load_state_dict` that raised left open."""
        while self._states:
            self.close_state()


@contextmanager
def full(parameters: Parameters, gather: Gather | None, edits: bool = True) -> Iterator[None]:
    """Lets all parameters be whole, as they are updated; what is written to them is kept.

    Args:
        parameters: All of a model.
        gather: Performs an all-gather; None with one rank.
        edits: Whether they may be written to, so that this rank needs a copy of what others share with it.
    """
    flat = parameters.flat
    parameters.take_given()
    wholes = _gather_all(flat, gather, edits)
    parameters.unpin()
    _show(flat, wholes)
    try:
        yield
    finally:
        if edits:
            _take_assigned(flat, wholes)
            _keep_edits(flat, wholes)
            if flat.is_sharded or flat.has_masters:
                parameters.updated()
        parameters.rest()
        parameters.take_as_they_are()


def leave(parameters: Parameters, gather: Gather | None) -> None:
    """Makes every parameter whole and plain, as it is updated, for good. A collective call where sharded."""
    flat = parameters.flat
    with full(parameters, gather):
        kept = {index: flat.all[index].data for index in flat.managed}
    for index in flat.managed:
        flat.all[index].grad = None
        disown(flat.all[index])
        flat.all[index].data = kept[index]


def _gather_all(flat: FlatParameters, gather: Gather | None, edits: bool) -> dict[str, Tensor]:
    """Whole parameters by bucket, where what is computed with is not what they are."""
    wholes: dict[str, Tensor] = {}
    with torch.no_grad():
        if gather is not None:
            for bucket, whole in _gathered(flat, gather):
                # One bucket at a time on the device.
                wholes[bucket.name] = whole if edits else whole.cpu()
        for bucket in flat.layout.buckets:
            if bucket.name in wholes:
                continue
            if has_master(flat.layout.flats[bucket.flat]):
                wholes[bucket.name] = flat.master(bucket)
            elif flat.shares_memory and edits:
                wholes[bucket.name] = flat.whole(bucket).clone()
    return wholes


def _gathered(flat: FlatParameters, gather: Gather) -> Iterator[tuple[Bucket, Tensor]]:
    """Each bucket that no rank has whole as it is updated, on every rank. Collective calls."""
    for bucket in flat.layout.buckets:
        if _is_gathered(flat, bucket):
            master = flat.master(bucket)
            whole = torch.empty(bucket.numel, dtype=master.dtype, device=flat.device)
            gather(whole, master, bucket.name)
            yield bucket, whole


def _is_gathered(flat: FlatParameters, bucket: Bucket) -> bool:
    return flat.is_sharded or (has_master(flat.layout.flats[bucket.flat]) and flat.shards > 1)


def _view(flat: FlatParameters, wholes: dict[str, Tensor], index: int) -> Tensor:
    bucket = flat.bucket_of[index]
    whole = wholes.get(bucket.name)
    return flat.views[index] if whole is None else parameter_in(whole, flat.layout.slots[index], bucket.start)


def _show(flat: FlatParameters, wholes: dict[str, Tensor]) -> None:
    for index in flat.managed:
        unguard(flat.all[index])
        flat.all[index].data = _view(flat, wholes, index)


def _take_assigned(flat: FlatParameters, wholes: dict[str, Tensor]) -> None:
    """Takes values of parameters that were given other data."""
    with torch.no_grad():
        for index in flat.managed:
            view = _view(flat, wholes, index)
            if flat.all[index].data_ptr() != view.data_ptr():
                view.copy_(flat.all[index].data)


def _keep_edits(flat: FlatParameters, wholes: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for bucket in flat.layout.buckets:
            if (whole := wholes.get(bucket.name)) is not None:
                size = bucket.numel // flat.shards
                if flat.shards > 1:
                    flat.master(bucket).copy_(whole[flat.shard_index * size : (flat.shard_index + 1) * size])
                if not flat.is_sharded and not flat.shares_memory:
                    flat.whole(bucket).copy_(whole)
