"""Going on after a step that a rank gave up or weights that were read, and the end of training."""

from __future__ import annotations

import functools
import sys
import warnings

import torch

from paceline.core.errors import EngineError
from paceline.core.ops import WRITTEN
from paceline.engine.engine import Engine
from paceline.engine.full_parameters import leave
from paceline.hooks.casting import cast_singular_vectors
from paceline.optimizers.watch import leave_optimizers


def reset(engine: Engine) -> None:
    """After an exception in forward or backward: drops the step's gradients and makes the engine usable.

    A collective call. Ranks may have failed in different places: collectives that some began and others did not end
    with their connections, and new ones are opened. Weights are what they were before the step.

    Raises:
        EngineError: Several ranks hold a GPU each, where other ranks' updates cannot be held back.
    """
    for other in engine.program.others.owners:
        # Gradients of the step are there, too.
        reset(other)
    program = engine.program
    if program.collectives is not None:
        program.collectives.require_reopens("pl.reset")
    engine.update.abandon()
    engine.state.reset()
    engine.forward.reset()
    for parameter in program.parameters.all:
        parameter.grad = None
    program.parameters.waiting.clear()
    if program.collectives is not None:
        program.collectives.reopen("pl.reset")
    # Only now has every rank ended what it did to weights, which may be in memory that ranks share.
    program.parameters.take_given(writes_over=True)
    program.parameters.drop_pins()
    engine.backward.reset()
    if program.gradients is not None:
        program.gradients.earlier.forget()
    program.statistics.clear()
    program.start()
    # A gather after the last update may have been among what was given up.
    program.parameters.updated()
    engine.forward.gather_update()


def weights_replaced(engine: Engine) -> None:
    """After this rank's shards, as they are updated, were written to between two steps: all else follows them.

    A collective call.
    """
    parameters = engine.program.parameters
    for parameter in parameters.all:
        parameter.grad = None
    engine.state.replace_weights()
    if engine.program.gradients is not None:
        engine.program.gradients.earlier.forget()
    parameters.updated()
    if engine.schedule.shares_memory and engine.program.collectives is not None:
        # What other ranks rounded is read by this one.
        engine.program.collectives.barrier(WRITTEN)
    engine.forward.gather_update()
    parameters.rest()
    parameters.flat.former.follow(parameters.flat.views)


def require_between_steps(engine: Engine, what: str, replaces: bool = False, compares: bool = False) -> None:
    """Refuses what would forget gradients that no update has used (see `StepState`), or edits.

    Args:
        engine: The model's.
        what: That.
        replaces: Whether it gives all weights other values, so that it does not matter what they are.
        compares: Whether it finds edits by comparing ranks: refused on the edited rank alone, the others would wait.

    Raises:
        EngineError: There are such.
    """
    if not replaces:
        engine.state.require_whole_weights(what)
        engine.settle()
        if not compares:
            engine.program.parameters.require_unedited()
    if engine.forward.whole.is_full:
        raise EngineError(
            f"{what} inside `with pl.full_parameters(model):`: what is edited there counts when it ends. Call it "
            "after that, on every rank"
        )
    engine.program.module_buffers.adopt()
    engine.state.require_between_steps(what, any(p.grad is not None for p in engine.program.parameters.all))
    if not replaces:
        engine.program.parameters.take_given()


def close(engine: Engine, whole: bool) -> None:
    """Ends the engine: hooks, threads and connections.

    Args:
        engine: The model's.
        whole: Whether the model is then a plain one on this rank; else it is of no more use, and none of its parameters
            takes memory that it had not.
    """
    collectives = engine.program.collectives
    managed = whole and bool(engine.program.parameters.flat.managed or engine.strategy.low)
    engine.program.module_buffers.adopt()
    if collectives is not None:
        collectives.note_exception()
        if collectives.has_given_up and managed:
            collectives.require_reopens("pl.release")
    if managed:
        engine.program.parameters.flat.require_in_place()
        if engine.state.gradients != "none" and sys.exc_info()[0] is None:
            _tell_of_gradients(engine)
    leave_optimizers(engine)
    if engine.strategy.low:
        cast_singular_vectors(engine.module, torch.float32)
    engine.remove_hooks()
    engine.state.end()
    if managed:
        if collectives is not None and collectives.has_given_up:
            collectives.reopen("pl.release")
            engine.program.start()
        engine.settle()
        leave(engine.program.parameters, functools.partial(collectives.gather, "pl.release") if collectives else None)
    if collectives is not None:
        collectives.close()


def _tell_of_gradients(engine: Engine) -> None:
    """An optimizer that steps on a model that was released would find none, and do nothing."""
    flat = engine.program.parameters.flat
    with torch._C.DisableTorchFunctionSubclass():
        lost = [index for index in flat.managed if flat.all[index].grad is not None]
    if lost:
        warnings.warn(
            f"pl.release drops gradients that no optimizer has used, such as {flat.layout.slots[lost[0]].spec.name}'s: "
            "ranks have shards of them. Step before it, or call zero_grad",
            stacklevel=4,
        )
