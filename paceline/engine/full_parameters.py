"""All parameters whole, for a while or for good: to be read, edited, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from paceline.buffers.whole_parameters import Gather, WholeParameters, gathered, is_gathered
from paceline.core.ops import READ, WRITTEN
from paceline.engine.parameters import Parameters
from paceline.engine.program import Program
from paceline.hooks.casting import cast_singular_vectors
from paceline.hooks.parameters import follow_accumulators
from paceline.tensors.sharded_parameter import disown

_STATE_DICT = "model.state_dict()"


class FullParameters:
    """All parameters whole and as they are updated, while somebody reads, edits, saves or loads them.

    Attributes:
        is_full: Whether they are so now.
    """

    def __init__(
        self, program: Program, wait_for_updates: Callable[[], None], may_be_edited: Callable[[], None]
    ) -> None:
        """Creates it with parameters that are not full.

        Args:
            program: The model's.
            wait_for_updates: Waits until every rank's update is here.
            may_be_edited: Is told when sharded parameters may have been edited.
        """
        self._program, self._wait_for_updates, self._may_be_edited = program, wait_for_updates, may_be_edited
        self.is_full = False
        self._states: list[AbstractContextManager[None]] = []

    @property
    def takes_memory(self) -> bool:
        """Whether all parameters whole take memory beside what a rank holds of them."""
        return any(is_gathered(self._program.parameters.flat, bucket) for bucket in self._program.layout.buckets)

    @contextmanager
    def full(self, call: str, edits: bool = True, is_state: bool = False) -> Iterator[None]:
        """Lets every parameter be whole and as it is updated. A collective call where they are sharded.

        Args:
            call: What the user called, for messages.
            edits: Whether they may be written to. Where ranks share memory, only that is a collective call. If they
                may not, graphs from before can still run backward.
            is_state: Whether they are only saved or loaded, and not computed with.
        """
        program = self._program
        program.module_buffers.adopt()
        if self.is_full or not (program.parameters.flat.managed or program.strategy.low):
            yield
            return
        self._wait_for_updates()
        program.parameters.require_unedited()
        vectors = program.strategy.low and not is_state
        if vectors:
            cast_singular_vectors(program.module, torch.float32)
        self.is_full = True
        collectives = program.collectives
        shared_by = collectives if edits and program.schedule.shares_memory else None
        try:
            with full(program.parameters, partial(collectives.gather, call) if collectives else None, edits, is_state):
                try:
                    yield
                except BaseException:
                    # Others may have been told of it already, and go no further.
                    if shared_by is not None and not shared_by.has_given_up:
                        shared_by.barrier(READ)
                    raise
                # What is written on leaving must not reach a rank that has yet to take its copy.
                if shared_by is not None:
                    shared_by.barrier(READ)
        finally:
            self.is_full = False
            if vectors:
                cast_singular_vectors(program.module, getattr(torch, program.strategy.precision))
            if edits and program.parameters.flat.is_sharded:
                self._may_be_edited()
            # Also after an exception, unless it has ended the job: what was written before it is kept.
            if shared_by is not None and not shared_by.has_given_up:
                shared_by.barrier(WRITTEN)
            program.parameters.flat.former.follow(program.parameters.flat.views)

    def attend(self) -> None:
        """Takes part in another rank's `model.state_dict()`, a bucket at a time, and keeps nothing of it."""
        program = self._program
        if self.is_full or not program.parameters.flat.managed:
            return
        self._wait_for_updates()
        program.parameters.require_unedited()
        program.parameters.take_given()
        if program.collectives is not None:
            for _ in gathered(program.parameters.flat, partial(program.collectives.gather, _STATE_DICT)):
                pass

    def open_states(self, edits: bool) -> None:
        """Enters `full`, until `close_state`, where parameters are not whole as they are."""
        self._program.module_buffers.adopt()
        parameters, call = self._program.parameters, "model.load_state_dict()" if edits else _STATE_DICT
        if parameters.flat.managed and not edits and not parameters.loses_edits:
            # Also where the loop has made them of another dtype, to save them.
            self._wait_for_updates()
            parameters.flat.require_in_place()
            parameters.flat.former.require_unedited(parameters.all)
        if edits:
            # An edited state that is loaded back is what the loop wants.
            parameters.state_edits.forget()
        managed = parameters.flat.managed and (edits or parameters.loses_edits)
        self._states.append(self.full(call, edits, is_state=True) if managed else nullcontext())
        self._states[-1].__enter__()

    def close_state(self) -> None:
        """Leaves what `open_states` entered last."""
        self._states.pop().__exit__(None, None, None)
        parameters = self._program.parameters
        if parameters.flat.is_sharded:
            parameters.state_edits.set(parameters.flat.managed)

    def close_states(self) -> None:
        """Leaves what a `load_state_dict` that raised left open."""
        while self._states:
            self.close_state()


@contextmanager
def full(
    parameters: Parameters, gather: Gather | None, edits: bool = True, is_state: bool = False
) -> Iterator[dict[int, Tensor]]:
    """Lets all parameters be whole, as they are updated; what is written to them is kept. Gives the data of each.

    Args:
        parameters: All of a model.
        gather: Performs an all-gather; None with one rank.
        edits: Whether they may be written to, so that this rank needs a copy of what others share with it.
        is_state: Whether they are only saved or loaded: see `WholeParameters`.
    """
    flat = parameters.flat
    parameters.take_given()
    parameters.unpin()
    whole = WholeParameters(flat, gather, edits, is_state)
    shown = whole.show()
    try:
        yield shown
    finally:
        whole.part_views()
        whole.narrow(edits)
        try:
            if edits:
                whole.keep()
                if flat.is_sharded or flat.has_masters:
                    parameters.updated()
        finally:
            parameters.rest()
            whole.lend(shown)


def leave(parameters: Parameters, gather: Gather | None) -> None:
    """Makes every parameter whole and plain, as it is updated, for good. A collective call where sharded."""
    with full(parameters, gather) as kept:
        pass
    for index, data in kept.items():
        parameters.all[index].grad = None
        disown(parameters.all[index])
        parameters.all[index].data = data
    follow_accumulators(parameters.all)
