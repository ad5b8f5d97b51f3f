"""`pl.save`: a whole training state, written by all ranks."""

from __future__ import annotations

import atexit
import contextlib
import operator
import platform
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.agreement import raise_first, reason
from paceline.checkpoint.contents import add_residuals, add_tensors, add_values, require_storable
from paceline.checkpoint.folder import discard, make_folder, require_shared
from paceline.checkpoint.given import Stateful, as_sequence, in_words, require
from paceline.checkpoint.optimizer_states import OptimizerStates
from paceline.checkpoint.random_states import Generator
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.rank_file import sync
from paceline.checkpoint.writing import OwnPart, commit, write_part
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.engine.api import engine_of
from paceline.engine.recovery import require_between_steps

PATIENCE_SECONDS = 600.0
"""How long rank 0 waits for a part of which nothing is heard."""


class Saving:
    """A checkpoint that is written, or has been.

    Attributes:
        path: Its folder.
        step: How many steps were done.
        stall_seconds: How long the call took that began it, in which this rank did nothing else.
        seconds: How long it took in all; None while it is written.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Nothing is written yet."""
        self.path, self.step = path, step
        self.stall_seconds = 0.0
        self.seconds: float | None = None
        self._began = time.perf_counter()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_seen = self._is_first = self._is_abandoned = False

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do, in whatever way it ended."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """Why it failed, as far as this rank knows by now. Rank 0 is told of every rank's failure."""
        self._is_seen = self.done
        return self._error if self.done else None

    def wait(self) -> None:
        """Returns when the checkpoint counts. A collective call.

        Raises:
            UserError: It could not be written; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_seen = True
        try:
            raise_first(self._error, "pl.save: how it ended", f"{self.path} was not saved")
        except UserError:
            if self._is_first:
                discard(self.path)
            raise

    def _begin(
        self, part: OwnPart, world: World, strategy: dict[str, Any], background: bool, beside: Iterable[Path]
    ) -> None:
        main, self._is_first = threading.current_thread(), world.rank == 0

        def write() -> None:
            try:
                write_part(self.path, part)
                if world.rank == 0:
                    for path in beside:
                        # What is written beside a checkpoint is worth less than that.
                        with contextlib.suppress(OSError):
                            sync(path)
                            sync(path.parent)
                    commit(
                        self.path,
                        self.step,
                        world.world_size,
                        strategy,
                        versions(),
                        PATIENCE_SECONDS,
                        lambda: self._is_abandoned or (background and _is_over_by_failure(main)),
                        part.token,
                    )
            except Exception as error:
                # Told by `wait`, on every rank.
                self._error = error
            self.seconds = time.perf_counter() - self._began

        if background:
            self._thread = threading.Thread(target=write, name="checkpoint")
            self._thread.start()
        else:
            write()
            self.wait()
        self.stall_seconds = time.perf_counter() - self._began


_in_flight: tuple[World, Saving] | None = None
"""What was begun in the background last, and in which job."""


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
    global _in_flight
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
        refused = error
    part.token = raise_first(refused, f"{label} {in_words(optimizers, schedulers)}", "", part.token)
    if world.world_size > 1:
        _require_shared(path, part.token, world)
    engine.settle()
    add_residuals(part, engine)
    add_tensors(part, engine, ranges, states, keeps_copies=background)
    saving = Saving(path, step)
    saving._began = began
    if background:
        _in_flight = world, saving
    saving._begin(part, world, asdict(engine.strategy), background, beside)
    return saving


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


def versions() -> dict[str, str]:
    """Of what writes a checkpoint."""
    from paceline import __version__

    return {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


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


def _is_over_by_failure(main: threading.Thread) -> bool:
    """Whether the program has ended by an exception, after which other ranks' parts may never come."""
    return not main.is_alive() and getattr(sys, "last_value", None) is not None


@atexit.register
def _tell_at_exit() -> None:
    """Says of a save that a program ended without waiting for that it failed. Threads have ended by now."""
    if _in_flight is not None and not _in_flight[1]._is_seen and (error := _in_flight[1].error) is not None:
        print(f"paceline: {_in_flight[1].path} was not saved: {reason(error)}", file=sys.stderr)


def finish_earlier(world: World) -> None:
    """Waits for the save that is under way, and warns if it failed. A collective call."""
    global _in_flight
    earlier, _in_flight = _in_flight, None
    if earlier is not None and earlier[0] is world:
        is_seen = earlier[1]._is_seen
        try:
            earlier[1].wait()
        except UserError as error:
            if not is_seen:
                warnings.warn(str(error), stacklevel=3)


def abandon_earlier() -> None:
    """Ends the save that is under way in a job that has lost a rank, whose part may never come."""
    global _in_flight
    earlier, _in_flight = _in_flight, None
    if earlier is not None:
        earlier[1]._is_abandoned = True
        if earlier[1]._thread is not None:
            earlier[1]._thread.join()
