"""The public verbs: make a model data-parallel, and what a plain training loop calls on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.world import current_world
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.engine import recovery
from paceline.engine.engine import Engine
from paceline.hooks.plain_copies import ENGINE, add_to, inside, take_from
from paceline.materialise.freed import keep_freed_memory
from paceline.models.require import require_model_and_strategy
from paceline.tensors.reduced_norm import forget_norms

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    strategy: Strategy | None = None,
    *,
    init: Callable[[nn.Module], Any] | None = None,
    weights: str | Path | None = None,
) -> M:
    """Makes `model` data-parallel over all ranks and returns it: the same object, with its own parameters.

    Rank 0's weights and buffers go to every rank. From then on `backward` leaves reduced gradients in `p.grad`,
    any torch optimizer steps on them, and `model.no_sync()` defers the reduction. `state_dict` keeps its names.

    What is on the meta device gets its memory and values here, one unit after another, so that with zero=3 no rank
    ever holds the whole model. Its values are those that `model.to_empty(device=...)` and `model.apply(init)` would
    give it with rank 0's random state, and, where weights are given, what these hold. Parameters stay the same objects.

    Args:
        model: Any module. On the meta device on some ranks or all, in whole or in part.
        strategy: How gradients are synchronised; default `Strategy()`.
        init: Only for the meta device: writes values to a module's parameters and buffers, and to those of modules
            inside it. Is called under `no_grad`, children first, with each module that has something on the meta device
            (and with those around it, up to its unit) for which `weights` has no value. By default a module's own
            `reset_parameters()`, which is not all that a model's constructor may do.
        weights: Only for the meta device: a safetensors file, or a folder of them, with the names of `state_dict`. Rank
            0 reads it, one tensor at a time.

    Raises:
        UserError: The model is no module, the strategy no Strategy; ranks built different models; the weights do not
            fit; or a parameter or buffer is left without values, or written to when its unit is done. A model on the
            meta device must then be made anew.
        ValueError: The model is parallel already.

    Example:
        >>> world = pl.init()
        >>> model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(8, 4).to(world.device)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    require_model_and_strategy("parallelize", model, strategy)
    if getattr(model, ENGINE, None) is not None:
        raise ValueError("parallelize: this model is already parallel")
    world = current_world()
    if world.device.type == "cpu":
        keep_freed_memory()
    engine, module = Engine(model, strategy or Strategy(), world, init, weights), inside(model)
    add_to(module, engine)
    return model


def engine_of(model: nn.Module) -> Engine:
    """The engine of a parallel model, to look into: its strategy, schedule, layout and events.

    Raises:
        ValueError: `parallelize` was not called on this model.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> pl.engine_of(model).strategy.zero
        0
        >>> pl.engine_of(model).record_events()
        >>> model(torch.randn(8, 4).to(pl.init().device)).square().mean().backward()
        >>> [event.kind for event in pl.engine_of(model).drain_events()]
        ['forward', 'backward']
    """
    engine = getattr(model, ENGINE, None)
    if engine is None:
        raise ValueError(f"{type(model).__name__} is not parallel: call pl.parallelize(model) first")
    return engine  # type: ignore[no-any-return]


def clip_grad_norm_(model: nn.Module, max_norm: float, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
    """Scales the reduced gradients so that their global 2-norm is at most `max_norm`.

    Called after a step's last backward. Every rank calls it. `torch.nn.utils.clip_grad_norm_` does the same, but where
    gradients are sharded only as long as nobody has changed them.

    Args:
        model: A parallel model.
        max_norm: The highest norm.
        parameters: Those of the model's whose gradients are meant, such as an optimizer's `group["params"]`, the same
            on every rank; by default all.

    Returns:
        The norm before clipping, in a 0-dim tensor, the same on every rank.

    Raises:
        EngineError: The gradients are not reduced yet.
        UserError: `max_norm` is a number below 0, which would turn gradients round, or NaN; or a parameter is not the
            model's.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=3))
        >>> model(torch.ones(8, 4).to(pl.init().device)).sum().backward()
        >>> print(f"{pl.clip_grad_norm_(model, 1.0):.3f}")
        25.298
        >>> print(f"{pl.clip_grad_norm_(model, 1.0):.3f}")
        1.000
    """
    if isinstance(max_norm, (int, float)) and not max_norm >= 0:  # a tensor may be on a device that is not waited for
        raise UserError(f"clip_grad_norm_: expected the highest norm as a number from 0 up, got {max_norm!r}")
    engine = engine_of(model)
    among = engine.norm.parameters if parameters is None else _require_parameters(engine, parameters)
    norm = engine.norm.now(among)
    gradients = [p.grad for p in among if p.grad is not None]
    with torch._C.DisableTorchFunctionSubclass():
        # The same constant as torch.nn.utils.clip_grad_norm_, so that results are comparable.
        if gradients:
            forget_norms(gradients)
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _require_parameters(engine: Engine, parameters: Any) -> list[nn.Parameter]:
    """Parameters of a model, each once."""
    given = {id(each): each for each in ([parameters] if isinstance(parameters, nn.Parameter) else parameters)}
    if not given.keys() <= set(map(id, engine.norm.parameters)):
        raise UserError(
            "clip_grad_norm_: expected parameters of the parallel model, such as an optimizer's group['params'], got "
            "one that is not: call it once for each model"
        )
    return list(given.values())


def full_parameters(model: nn.Module) -> AbstractContextManager[None]:
    """Inside `with pl.full_parameters(model):` every parameter is whole, in its own shape and dtype.

    For reading and editing; what is written is kept. Where parameters are sharded it is a collective call: every rank
    enters, and writes the same values.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=3))
        >>> with pl.full_parameters(model), torch.no_grad():
        ...     norms = model.weight.norm(dim=1)
        >>> norms.shape
        torch.Size([2])
    """
    return engine_of(model).full_parameters()


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns `model.state_dict()` on rank 0 alone: the others keep nothing of it. A collective call.

    Where parameters are sharded, or updated in another dtype than they are computed with, they are gathered a bucket at
    a time and put into rank 0's host memory: other ranks never hold more than one bucket of them, as with
    `model.state_dict()` each does.

    Returns:
        Names and tensors on rank 0; nothing on other ranks.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=3))
        >>> weights = pl.full_state_dict(model)
        >>> if pl.init().rank == 0:
        ...     torch.save(weights, "weights.pt")
    """
    engine = engine_of(model)
    if engine.world.rank == 0:
        return model.state_dict()
    engine.forward.whole.attend()
    return {}


def broadcast_buffers(model: nn.Module) -> None:
    """Gives every rank rank 0's buffers, such as the running statistics of BatchNorm. A collective call.

    After a backward those that its forwards have changed are rank 0's from the next forward on anyway, as by DDP. Call
    it where they were changed otherwise: by hand on one rank, or in a forward that no backward came after.
    """
    program = engine_of(model).program
    program.module_buffers.adopt()
    if program.collectives is not None:
        program.collectives.broadcast(model.buffers(), "pl.broadcast_buffers")


def reset(model: nn.Module) -> None:
    """After an exception in forward or backward: drops the step's gradients, so that the next batch starts clean.

    Every rank calls it. Weights are what they were before the step.

    Raises:
        EngineError: Several ranks hold a GPU each. Others have queued the update behind the failed step's reductions by
            then, so the job is to be started again from a checkpoint.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2))
        >>> try:
        ...     model(torch.randn(8, 5))
        ... except RuntimeError:
        ...     pl.reset(model)
    """
    recovery.reset(engine_of(model))


def release(model: nn.Module) -> Any:
    """Ends the engine of a model: threads and connections are closed, the model is a plain one again.

    Gradients of which ranks have shards are dropped, with a warning where no optimizer has used them.

    Returns:
        The same model, with whole parameters. Where they were sharded it is a collective call.

    Raises:
        EngineError: Several ranks hold a GPU each, an exception is on its way, and parameters are not whole: the other
            ranks are elsewhere.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=3))
        >>> pl.release(model).weight.shape
        torch.Size([2, 4])
    """
    recovery.close(engine_of(model), whole=True)
    take_from(inside(model))
    return model
