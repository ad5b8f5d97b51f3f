"""The public verbs: make a model data-parallel, and what a plain training loop calls on it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.world import all_gather_json, current_world
from paceline.engine.engine import Engine
from paceline.strategy import Strategy

_ATTRIBUTE = "_paceline_engine"
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def parallelize(model: M, strategy: Strategy | None = None) -> M:
    """Makes `model` data-parallel over all ranks and returns it: the same object, with its own parameters.

    Rank 0's weights and buffers go to every rank. From then on `backward` leaves reduced gradients in `p.grad`,
    any torch optimizer steps on them, and `model.no_sync()` defers the reduction. `state_dict` keeps its names.

    Args:
        model: Any module, with weights.
        strategy: How gradients are synchronised; default `Strategy()`.

    Raises:
        UserError: Ranks built different models, or the model is already parallel.
    """
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise ValueError("parallelize: this model is already parallel")
    engine = Engine(model, strategy or Strategy(), current_world())
    reference = weakref.ref(engine)

    def no_sync_of_model() -> AbstractContextManager[None]:
        alive = reference()
        if alive is None:
            raise ValueError("no_sync: this model is not parallel")
        return alive.no_sync()

    setattr(model, _ATTRIBUTE, engine)
    model.no_sync = no_sync_of_model  # type: ignore[assignment]
    model.__deepcopy__ = partial(_copy, weakref.ref(model))  # type: ignore[assignment]
    return model


def _copy(reference: weakref.ref[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a parallel model is a plain model with whole parameters."""
    model = reference()
    assert model is not None
    ours = {name: model.__dict__.pop(name) for name in (_ATTRIBUTE, "no_sync", "__deepcopy__")}
    try:
        with ours[_ATTRIBUTE].full_parameters():
            return copy.deepcopy(model, memo)
    finally:
        model.__dict__.update(ours)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a parallel model.

    Raises:
        ValueError: `parallelize` was not called on this model.
    """
    engine = getattr(model, _ATTRIBUTE, None)
    if engine is None:
        raise ValueError(f"{type(model).__name__} is not parallel: call pl.parallelize(model) first")
    return engine  # type: ignore[no-any-return]


def accumulate(model: nn.Module, batches: Iterable[T], uneven: bool = False) -> Iterator[T]:
    """Yields micro-batches such that only the last one's backward completes the step's gradients.

    Scale each loss yourself, as in any accumulating loop.

    Args:
        model: A parallel model.
        batches: The micro-batches of one optimizer step, on this rank.
        uneven: Whether ranks may have different numbers of them, or none. They are then counted over ranks first, and
            a rank without one contributes zeros. If not, every rank has equally many.
    """
    engine = engine_of(model)
    if uneven:
        batches = list(batches)
        most = max(all_gather_json(len(batches)))
        for index in range(most):
            with engine.no_sync() if index < most - 1 else nullcontext():
                if index < len(batches):
                    yield batches[index]
                else:
                    engine.idle_micro_batch()
        return
    iterator = iter(batches)
    try:
        current = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        with engine.no_sync():
            yield current
        current = following
    yield current


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the reduced gradients so that their global 2-norm is at most `max_norm`.

    Returns:
        The norm before clipping: a 0-dim tensor, the same on every rank.
    """
    norm = engine_of(model).grad_norm()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        # The same constant as torch.nn.utils.clip_grad_norm_, so that results are comparable.
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def full_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """Inside `with pl.full_parameters(model):` every parameter is whole, in its own shape and dtype.

    For reading and editing; what is written is kept. Where parameters are sharded it is a collective call: every rank
    enters, and writes the same values.
    """
    return engine_of(model).full_parameters()


def broadcast_buffers(model: nn.Module) -> None:
    """Gives every rank rank 0's buffers, such as the running statistics of BatchNorm. A collective call."""
    engine_of(model).broadcast_buffers()


def reset(model: nn.Module) -> None:
    """After an exception in forward or backward: drops the step's gradients, so that the next batch starts clean.

    Every rank calls it. Weights are what they were before the step.
    """
    engine_of(model).reset()


def release(model: nn.Module) -> Any:
    """Ends the engine of a model: threads and connections are closed, the model is a plain one again."""
    engine_of(model).close()
    for name in (_ATTRIBUTE, "no_sync", "__deepcopy__"):
        delattr(model, name)
    return model
