"""`pl.save`: a whole training state, written by all ranks."""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.agreement import raise_first
from paceline.checkpoint.contents import add_residuals, add_tensors, add_values, require_storable
from paceline.checkpoint.folder import discard, make_folder, require_shared
from paceline.checkpoint.given import Stateful, as_sequence, in_words, require
from paceline.checkpoint.optimizer_states import OptimizerStates
from paceline.checkpoint.random_states import Generator
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.saving import Saving, begin, finish_earlier
from paceline.checkpoint.writing import OwnPart
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.engine.api import engine_of
from paceline.engine.recovery import require_between_steps


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    step: int,
    scheduler: Stateful | Sequence[Stateful] = (),
    loader: Stateful | None = None,
    rng: Generator | Sequence[Generator] = (),
    extra: Any = None,
    background: bool = False,
) -> Saving:
    """Saves all that training goes on from, for any number of ranks, stage and precision. A collective call.

    Between two steps: after `optimizer.step()`, or before the first forward. Each rank writes its share of the elements
    of parameters, as they are updated, and of the optimizer's states; rank 0 writes buffers, the scheduler and `extra`;
    every rank its random states (torch's, Python's, NumPy's) and its loader's. The checkpoint counts when its
    manifest is there, which comes last: whatever ends a job on the way leaves older checkpoints as they are.

    Args:
        path: Its folder, which all ranks share and which must be new; such as `checkpoints/step-00000100`.
        model: Parallel.
        optimizer: One or several that hold its parameters.
        step: How many steps were done, for `load` to return: the same on every rank.
        scheduler: One or several, a `GradScaler` among them or whatever else all ranks have alike; rank 0's is saved.
        loader: What has a `state_dict` of this rank's place in the data.
        rng: Generators that the loop draws from besides torch's, Python's and NumPy's own: of each rank its own.
        extra: Numbers, text, lists, dictionaries and tensors; rank 0's is saved.
        background: Whether to return when all is copied in memory, and write beside training. One save is under way at
            a time: the next waits for it, as `load` and the program's end do, and warns if it failed. The memory is
            kept for the next.

    Returns:
        The checkpoint's path, and in the background how far it is.

    Raises:
        UserError: The folder is not new or cannot be written to, or something cannot be saved; the same on every rank.
        CommunicationError: Ranks gave different paths or steps.
        EngineError: A step is under way.

    Example:
        >>> model = pl.parallelize(torch.nn.Linear(8, 8), pl.Strategy(zero=1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> saved = pl.save("checkpoints/step-00000100", model, optimizer, step=100, extra={"best": 1.25})
        >>> pl.load("checkpoints", model, optimizer).step
        100
    """
    # Here, so that a warning names the line that called.
    finish_earlier(engine_of(model).world)
    return save_beside((), path, model, optimizer, step, scheduler, loader, rng, extra, background)


@torch.inference_mode(False)
def save_beside(
    beside: Iterable[Path],
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    step: int,
    scheduler: Stateful | Sequence[Stateful] = (),
    loader: Stateful | None = None,
    rng: Generator | Sequence[Generator] = (),
    extra: Any = None,
    background: bool = False,
) -> Saving:
    """As `save`; files that rank 0 writes beside it, such as a log, are on the disk before the checkpoint counts."""
    began, engine, label = time.perf_counter(), engine_of(model), f"pl.save of step {step} to {path}"
    # It is written to when the program may be in another folder.
    path = Path(path).expanduser().absolute()
    optimizers, schedulers = as_sequence(optimizer), as_sequence(scheduler)
    world, part = engine.world, OwnPart(engine.world.rank, token=secrets.token_hex(8))
    finish_earlier(world)
    refused: Exception | None = None
    try:
        require_between_steps(engine, "pl.save")
        step = _whole(step)
        require(optimizers, schedulers, loader)
        ranges = Ranges(engine)
        require_storable(engine, ranges)
        states = OptimizerStates(ranges, engine.program.parameters.all, optimizers)
        add_values(part, engine, states, schedulers, loader, extra, as_sequence(rng))
        if world.rank == 0:
            make_folder(path, part.token)
    except Exception as error:
        # A scheduler's or loader's own class raises what it likes; no rank may write without this one.
        refused = error
    part.token = raise_first(refused, f"{label} {in_words(optimizers, schedulers)}", "", part.token)
    if world.world_size > 1:
        _require_shared(path, part.token, world)
    add_residuals(part, engine)
    add_tensors(part, engine, ranges, states, keeps_copies=background)
    return begin(Saving(path, step, began), part, world, asdict(engine.strategy), background, beside)


def _require_shared(path: Path, token: str, world: World) -> None:
    """Makes sure that all see the folder that rank 0 has made, before any waits for files there. A collective call."""
    unseen: Exception | None = None
    try:
        require_shared(path, token)
    except UserError as error:
        unseen = error
    try:
        raise_first(unseen, "pl.save: whether all see its folder", "pl.save")
    except UserError:
        # Another rank's folder of this name may hold anything.
        if world.rank == 0:
            discard(path)
        raise


def _whole(step: Any) -> int:
    """A number of steps, as `load` reads it.

    Raises:
        UserError: It is none.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise UserError(f"step: expected how many steps were done, a whole number from 0 up, got {step!r}")
    return number
