"""All parameters whole, for a while or for good: to be read, edited, saved and loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.buffers.parameters import Parameters
from paceline.buffers.whole_parameters import Gather, WholeParameters, gathered, is_gathered
from paceline.core.errors import EngineError
from paceline.core.ops import READ, WRITTEN
from paceline.core.step_state import StepState
from paceline.engine.program import Program
from paceline.hooks.casting import cast_singular_vectors
from paceline.hooks.parameters import follow_accumulators
from paceline.tensors.sharded_parameter import disown

_STATE_DICT = "model.state_dict()"


class Passes(Protocol):
    """The passes of a model, as far as they are in the way of whole parameters."""

    @property
    def is_computing(self) -> bool:
        """Whether a forward or backward is under way, in whichever thread."""

    @property
    def is_beside(self) -> bool:
        """Whether this thread is beside the one that trains."""

    def wait_for_updates(self) -> None:
        """Waits until every rank's update is here."""


class _Opened(threading.local):
    """What a thread has opened, the last at the end."""

    def __init__(self) -> None:
        self.states: list[AbstractContextManager[None]] = []


class FullParameters:
    """All parameters whole and as they are updated, while somebody reads, edits, saves or loads them.

    Attributes:
        is_full: Whether they are so now.
    """

    def __init__(self, program: Program, state: StepState, passes: Passes) -> None:
        """Creates it with parameters that are not full."""
        self._program, self._state, self._passes = program, state, passes
        self.is_full, self._thread = False, 0
        self._opened = _Opened()

    @property
    def others(self) -> list[FullParameters]:
        """Those of other models that the model has parameters of."""
        return [other.forward.whole for other in self._program.others.owners]

    @property
    def takes_memory(self) -> bool:
        """Whether all parameters whole take memory beside what a rank holds of them."""
        return any(is_gathered(self._program.parameters.flat, bucket) for bucket in self._program.layout.buckets)

    @contextmanager
    @torch.inference_mode(False)
    def full(self, call: str, edits: bool = True, is_state: bool = False) -> Iterator[None]:
        """Lets every parameter be whole and as it is updated. A collective call where they are sharded.

        Args:
            call: What the user called, for messages.
            edits: Whether they may be written to. Where ranks share memory, only that is a collective call. If they
                may not, graphs from before can still run backward.
            is_state: Whether they are only saved or loaded, and not computed with.

        Raises:
            EngineError: They are in use.
        """
        with ExitStack() as opened:
            for each in (*self.others, self):
                opened.enter_context(each._own(call, edits, is_state))
            yield

    @contextmanager
    def _own(self, call: str, edits: bool, is_state: bool) -> Iterator[None]:
        program = self._program
        vectors = program.strategy.low and not is_state
        if not self._begin(call, vectors):
            yield
            return
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
                self._state.end_edit()
            # Also after an exception, unless it has ended the job: what was written before it is kept.
            if shared_by is not None and not shared_by.has_given_up:
                shared_by.barrier(WRITTEN)
            program.parameters.flat.former.follow(program.parameters.flat.views)

    def _begin(self, call: str, vectors: bool) -> bool:
        program = self._program
        # No forward or step begins in another thread meanwhile.
        with program.lock:
            self._require_unused(call, self._passes.is_computing)
            program.module_buffers.adopt()
            if self.is_full or not (program.parameters.flat.managed or program.strategy.low):
                return False
            self._passes.wait_for_updates()
            self._require_no_step(call)
            program.parameters.require_unedited()
            if vectors:
                cast_singular_vectors(program.module, torch.float32)
            self.is_full, self._thread = True, threading.get_ident()
        return True

    def _require_unused(self, call: str, are_computed_with: bool = False) -> None:
        is_others = self.is_full and self._thread != threading.get_ident()
        if self._passes.is_beside and (are_computed_with or is_others or self._program.parameters.are_local):
            raise EngineError(
                f"{call} in a thread beside the one that trains, amid a forward, backward or optimizer.step() there: "
                "call it in that thread, between steps, and give others copies"
            )

    def _require_no_step(self, call: str) -> None:
        if self._program.parameters.are_local:
            raise EngineError(
                f"{call} amid optimizer.step(), where parameters are this rank's shards: call it after the step. A "
                "signal's handler sets a flag, and the loop calls it then"
            )

    @torch.inference_mode(False)
    def attend(self) -> None:
        """Takes part in another rank's `model.state_dict()`, a bucket at a time, and keeps nothing of it."""
        program = self._program
        if self.is_full or not program.parameters.flat.managed:
            return
        self._passes.wait_for_updates()
        program.parameters.require_unedited()
        program.parameters.take_given()
        if program.collectives is not None:
            for _ in gathered(program.parameters.flat, partial(program.collectives.gather, _STATE_DICT)):
                pass

    def open_states(self, edits: bool) -> None:
        """Enters `full`, until `close_state`, where parameters are not whole as they are.

        Raises:
            EngineError: They are in use.
        """
        parameters, call = self._program.parameters, "model.load_state_dict()" if edits else _STATE_DICT
        changes = parameters.flat.managed and (edits or parameters.loses_edits)
        opened: AbstractContextManager[None] = nullcontext()
        if edits:
            # An edited state that is loaded back is what the loop wants.
            parameters.state_edits.forget()
        if changes:
            opened = self.full(call, edits, is_state=True)
        elif self._passes.is_beside:
            opened = self._read_beside(call)
        else:
            self._program.module_buffers.adopt()
            if parameters.flat.managed:
                # Also where the loop has made them of another dtype, to save them.
                self._passes.wait_for_updates()
                self._require_no_step(call)
                parameters.flat.require_in_place()
                parameters.flat.former.require_unedited(parameters.all)
        opened.__enter__()
        self._opened.states.append(opened)

    @contextmanager
    def _read_beside(self, call: str) -> Iterator[None]:
        """Lets a thread beside the one that trains read parameters, which are whole but for inside a step."""
        parameters, generation = self._program.parameters, self._state.generation
        self._require_unused(call)
        self._program.executor.wait_beside(parameters.waiting)
        yield
        if parameters.flat.managed and generation != self._state.generation:
            raise EngineError(
                f"{call} in a thread beside the one that trains, whose optimizer has stepped meanwhile: some of it may "
                "be this rank's shards. Call it in that thread, between steps, and give others copies"
            )
        self._require_unused(call)

    def close_state(self) -> None:
        """Leaves what `open_states` entered last."""
        self._opened.states.pop().__exit__(None, None, None)
        parameters = self._program.parameters
        if parameters.flat.is_sharded:
            parameters.state_edits.set(parameters.flat.managed)

    def close_states(self) -> None:
        """Leaves what a `load_state_dict` in this thread that raised has left open."""
        while self._opened.states:
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


@torch.inference_mode(False)
def leave(parameters: Parameters, gather: Gather | None) -> None:
    """Makes every parameter whole and plain, as it is updated, for good. A collective call where sharded."""
    with full(parameters, gather) as kept:
        pass
    for index, data in kept.items():
        parameters.all[index].grad = None
        disown(parameters.all[index])
        parameters.all[index].data = data
    follow_accumulators(parameters.all)
