"""Runs a program in one process and by ranks."""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import paceline as pl
from tests.programs.adapter import Ddp, Job, Parallel, Plain, state_of
from tests.programs.loops import Training
from tests.programs.outcome import REFUSED, RIGHT, UNSERVED, Outcome, Seen, judge
from tests.programs.program import Program
from tests.programs.rounded import rounding_alone
from tests.ranks import RankError, RankPool

TIME_LIMIT = 10.0
"""Seconds until ranks give each other up."""
MEETING = 1.5
"""Seconds that a rank with an error waits for the others to tell of theirs, before it frees those who wait for it."""


def trained(program: Program, job: Job, dtype: torch.dtype) -> None:
    """Runs the program's loop in a job."""
    Training(program.model, program.loop, program.seed, dtype, job).run()


def alone(program: Program) -> Plain:
    """The reference: one process that plays all ranks, in float64."""
    job = Plain(program.ranks)
    trained(program, job, torch.float64)
    if not all(value.isfinite().all() for state in job.states[-1] for value in state.values()):
        raise ValueError("the program's weights are not finite in one process")
    return job


def together(program: Program, folder: str, dtype: torch.dtype, peer: str) -> Seen:
    """What one rank saw; each rank calls it with a folder in which ranks can leave word of how it went.

    When an error ends the loop of all ranks, they reset their models together, as users are told to, and read weights.
    When it ends that of one, the others are waiting: it resets its models after a while, which ends what they wait in.
    """
    world = pl.init()
    if peer == "ddp":
        job: Job = Ddp(world.world_size, world.rank, find_unused=False)
    elif peer == "ddp, unused":
        job = Ddp(world.world_size, world.rank, find_unused=True)
    else:
        job = Parallel(world.world_size, world.rank, program.strategy)
    seen, began = Seen(), time.monotonic()
    try:
        trained(program, job, dtype)
        seen.weights = [state_of(model) for model in job.models]
    except Exception as error:
        _tell(seen, error)
        # Whoever raises it, Gloo or paceline: a program itself takes some tens of milliseconds.
        seen.late = time.monotonic() - began > TIME_LIMIT - 1
    seen.changes, seen.notes = job.changes, job.notes
    words = _meet(Path(folder), world, "error" if seen.error else "done", TIME_LIMIT + 3 if not seen.error else MEETING)
    orderly = True
    if peer == "paceline" and set(words) != {"done"}:
        orderly = _after_error(seen, job)
    elif "error" in words:
        orderly = False
    if peer == "paceline" and orderly:
        for model in job.models:
            pl.release(model)
    if not orderly:
        with contextlib.suppress(Exception):
            pl.shutdown()
    return seen


def _tell(seen: Seen, error: Exception) -> None:
    seen.error, seen.message = type(error).__name__, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    seen.where = "".join(traceback.format_list(frames[-4:]))


def _after_error(seen: Seen, job: Job) -> bool:
    """Resets all models and reads their weights; whether that went well."""
    try:
        for model in job.models:
            pl.reset(model)
        seen.weights = [state_of(model) for model in job.models]
    except Exception as error:
        seen.weights = None
        seen.where += f"\nand then {type(error).__name__}: {error}\n" + traceback.format_exc(limit=-2)
        return False
    return True


def _meet(folder: Path, world: pl.World, word: str, seconds: float) -> list[str]:
    """The words of all ranks, as far as they come in time."""
    mine = folder / f"{world.rank}"
    mine.with_suffix(".new").write_text(word)
    mine.with_suffix(".new").rename(mine)
    paths, end = [folder / str(rank) for rank in range(world.world_size)], time.monotonic() + seconds
    while time.monotonic() < end and not all(path.exists() for path in paths):
        time.sleep(0.001)
    return [path.read_text() if path.exists() else "nothing" for path in paths]


def outcome(program: Program, pool: RankPool, peer: str = "paceline") -> Outcome:
    """Runs a program both ways and says what became of it.

    Args:
        program: What to run.
        pool: Plays the ranks.
        peer: "paceline"; or "ddp", to see whether it is right there, in one of two settings.
    """
    try:
        reference = alone(program)
    except Exception as error:
        return Outcome("INVALID", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    if peer == "ddp":
        found = _held_against(reference, program, pool, torch.float64, peer)
        return found if found.fine else _held_against(reference, program, pool, torch.float64, "ddp, unused")
    if program.strategy.low:
        found = _in_low_precision(reference, program, pool)
    else:
        found = _held_against(reference, program, pool, torch.float64, peer)
    if found.kind == UNSERVED and not outcome(_for_ddp(program), pool, "ddp").fine:
        return Outcome(REFUSED, f"as by DDP. {found.why}")
    return found


def _for_ddp(program: Program) -> Program:
    """A program without what DDP has no words for, but paceline has."""
    loop = replace(program.loop, fails="" if program.loop.fails == "backward" else program.loop.fails)
    if loop.way == "uneven":
        loop = replace(loop, way="no_sync", micro_batches=(max(loop.micro_batches),))
    return replace(program, loop=loop, strategy=pl.Strategy())


def _held_against(
    reference: Plain, program: Program, pool: RankPool, dtype: torch.dtype, peer: str, **tolerances: float
) -> Outcome:
    try:
        return judge(program, reference, _on_ranks(program, pool, dtype, peer), **tolerances)
    except RankError as error:
        return Outcome("HUNG", str(error)[-3000:])


def _on_ranks(program: Program, pool: RankPool, dtype: torch.dtype, peer: str) -> list[Seen]:
    with tempfile.TemporaryDirectory(prefix="paceline-program-") as folder:
        run: Callable[..., list[Seen]] = pool
        return run(program.ranks, together, program, folder, dtype, peer, timeout=TIME_LIMIT)


def _in_low_precision(reference: Plain, program: Program, pool: RankPool) -> Outcome:
    """Holds a program in low precision against itself at zero 0: both round alike, but in sums of another order.

    What zero 0 does is held against one process in float64, as far as rounding lets it: some programs enlarge errors
    such that one process in low precision is as far from that.
    """
    strategy = replace(program.strategy, zero=0, share_parameters=False, shard=0, accumulation="auto", prefetch=1)
    whole = replace(program, strategy=strategy)
    try:
        peers = _on_ranks(whole, pool, torch.float32, "paceline")
    except RankError as error:
        return Outcome("HUNG", f"at zero 0: {str(error)[-3000:]}")
    off, noted = 0.03, 0.3
    found = judge(whole, reference, peers, off, noted)
    if found.kind == "WRONG":
        alone_off, alone_noted = rounding_alone(program, reference)
        found = judge(whole, reference, peers, max(off, 1.5 * alone_off), max(noted, 1.5 * alone_noted))
    if not found.fine:
        return Outcome(found.kind, f"at zero 0: {found.why}")
    if program.strategy == strategy:
        return found
    if found.kind == RIGHT:
        # Of what happened on the way only this is known.
        assert peers[0].weights is not None
        reference.notes, reference.states[-1] = peers[0].notes, peers[0].weights
        off, noted = 4e-3, 0.06
    return _held_against(reference, program, pool, torch.float32, "paceline", tolerance=off, noted=noted)
