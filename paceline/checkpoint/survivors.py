"""What the ranks of a job that lost one still hold in memory, written where those of the next job read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.contents import add_tensors, add_values
from paceline.checkpoint.optimizer_states import OptimizerStates
from paceline.checkpoint.ranges import Ranges
from paceline.checkpoint.writing import OwnPart, commit, write_part
from paceline.core.placement import Placement
from paceline.engine.engine import Engine


def choose_writers(placement: Placement, done: Mapping[int, int]) -> tuple[int, list[int]] | None:
    """The latest step after which surviving ranks hold every element between them, and those ranks. Pure.

    A rank is lost in some step, which others may have ended while the rest have not: what they hold is then of two
    steps.

    Args:
        placement: Of the job that lost a rank.
        done: How many steps each survivor has done, by its rank in that job.

    Returns:
        The step and the ranks that have done it, in order; None where some elements were the lost rank's alone.
    """
    holders = [[0]] if placement.strategy.has_server(placement.world_size) else placement.ranks_of("replicate")
    for step in sorted(set(done.values()), reverse=True):
        writers = sorted(rank for rank, steps in done.items() if steps == step)
        if all(any(rank in writers for rank in group) for group in holders):
            return step, writers
    return None


def is_writable(engine: Engine) -> bool:
    """Whether ranks can write what they hold without asking others."""
    ranges = Ranges(engine)
    return not any(map(ranges.is_gathered, range(len(ranges.names))))


def write_held(
    folder: Path, engine: Engine, optimizer: Optimizer, extra: Any, writers: Sequence[int]
) -> list[tuple[str, int]]:
    """Writes what this rank holds, one of `writers`, of a job that is over.

    Args:
        folder: Of the checkpoint, which is there.
        engine: Of the model as it was trained in that job.
        optimizer: Of the model.
        extra: See `pl.save`.
        writers: Ranks of that job that hold all elements between them.

    Returns:
        The name and bytes of each file that it wrote.

    Raises:
        OSError: It cannot be written.
    """
    part = OwnPart(list(writers).index(engine.world.rank))
    ranges = Ranges(engine, writers)
    states = OptimizerStates(ranges, engine.program.parameters.all, [optimizer])
    add_values(part, engine, states, (), None, extra)
    add_tensors(part, engine, ranges, states)
    return [(path.name, path.stat().st_size) for path in write_part(folder, part)]


def commit_held(folder: Path, engine: Engine, step: int, writers: Sequence[int]) -> Path:
    """Makes a checkpoint of what all `writers` have written, which is in the folder: by one of them.

    Args:
        folder: Of the checkpoint.
        engine: See `write_held`.
        step: How many steps were done.
        writers: See `write_held`.

    Returns:
        The file that makes it one.

    Raises:
        UserError: Something is missing.
        OSError: It cannot be written.
    """
    return commit(folder, step, len(writers), asdict(engine.strategy), patience=0.0)
