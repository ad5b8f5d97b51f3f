"""Training that goes on when a rank is lost, from what the other ranks hold in memory or the latest checkpoint."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline as pl
from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in, step_folder
from paceline.checkpoint.hand_on import hand_on
from paceline.checkpoint.save import abandon_earlier
from paceline.checkpoint.survivors import choose_writers, commit_held, is_writable, write_held
from paceline.comm.patience import end_waits_when
from paceline.core.errors import UserError
from paceline.launch.seat import Place, Seat
from paceline.launch.stop import StopRequest
from paceline.launch.worker import lost_a_peer
from paceline.train.config import TrainConfig
from paceline.train.resume import Resume, find_resume
from paceline.train.training import Training

_WORTH_COLLECTING = 64 << 20
"""Bytes of a model from which on memory that only the garbage collector frees is worth its quarter of a second."""


class LeaveJob(Exception):
    """The ranks leave the job between two steps, to form one with more ranks."""


@dataclass
class Former:
    """What is left in this process of the job that it was in before.

    Attributes:
        stop: Remembers a stop that is asked for, also between two jobs.
        run: The run's folder, once it is known.
        training: What this rank trained with, where it came so far.
        place: Its place in that job.
        left: When it left, in seconds on the host's monotonic clock.
    """

    stop: StopRequest
    run: Path | None = None
    training: Training | None = None
    place: Place | None = None
    left: float | None = None

    def holds(self) -> str:
        """The same for ranks that hold the same elements after the same step."""
        if self.training is None:
            return ""
        schedule = pl.engine_of(self.training.model).schedule
        shard = schedule.rank if schedule.has_server else schedule.shard_index
        return f"shard {shard} after step {self.training.update.done}"

    def writes(self) -> bool:
        """Whether this rank can hand on what it holds."""
        return self.training is not None and is_writable(pl.engine_of(self.training.model))


def train_in_places(config: TrainConfig, seat: Seat) -> int:
    """Trains as the rank that the launcher says, in one job after the other; returns the exit status.

    Raises:
        Exception: What ends the run: whatever is not the loss of another rank.
    """
    from paceline.train.loop import train

    end_waits_when(seat.why_broken)
    with StopRequest() as stop:
        former = Former(stop)
        while (place := seat.take_place(_warm_up, former.holds())) is not None:
            try:
                return train(config, former, seat)
            except LeaveJob:
                pass
            except Exception as error:
                if not lost_a_peer(error):
                    raise
            former.place, former.left = place, time.monotonic()
            abandon_earlier()
            pl.shutdown()
    return 0


def _warm_up() -> None:
    """Trains a step of next to nothing, so that a spare has imported what a step needs when its time comes."""
    model = pl.parallelize(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    pl.release(model)
    pl.shutdown()


def go_on(config: TrainConfig, former: Former, place: Place) -> Resume | None:
    """What a job goes on from, which may have lost ranks of the one before, or be the first. A collective call.

    Ranks that were in it write what they hold into the folder in memory. Where the strategy replicates it, that is all;
    else a lost rank's shards are lost with it, and the latest checkpoint has to do.

    Returns:
        As `find_resume`, of the run that the job before trained.
    """
    told: list[dict[str, Any]] = pl.all_gather_json(_account(former), "what ranks have left of the job before")
    runs = [each["run"] for each in told if each["run"] is not None]
    if place.work:
        # Known to the launcher where all ranks were lost.
        runs.append(place.work)
    if not runs:
        former.training = None
        return find_resume(config)
    path, error = _memory(former, place, told)
    _let_go(former)
    run = former.run = Path(runs[0])
    if path is not None and not error:
        return Resume(run, path)
    checkpoints = pl.all_gather_json(_has_checkpoint(run), "whether the run has a checkpoint")[0]
    return Resume(run, run / CHECKPOINTS if checkpoints else None)


def _memory(former: Former, place: Place, told: list[dict[str, Any]]) -> tuple[Path | None, str]:
    """The checkpoint that is made of what ranks hold, on every host; and what went wrong. A collective call."""
    chosen = _choose(former, place, told)
    written = _agreed(partial(_write, former, place, chosen), "what ranks hold in memory")
    paths = [Path(each["path"]) for each in written.values if each]
    if not paths or written.error:
        return None, written.error
    world, several = pl.init(), place.local_world_size < place.world_size
    if several:
        files = [(rank, name, size) for rank, each in enumerate(written.values) if each for name, size in each["files"]]
        problem = _agreed(lambda: _copied(paths[0], files, world), "copies of what ranks hold").error
        if problem:
            return None, problem
    commits = world.rank == next(rank for rank, each in enumerate(written.values) if each)
    made = _agreed(partial(_commit, former, paths[0], chosen) if commits else _nothing, "a checkpoint in memory")
    if several and not made.error:
        index = next((rank, *each) for rank, each in enumerate(made.values) if each)
        return paths[0], _agreed(lambda: _copied(paths[0], [index], world), "copies of its manifest").error
    return paths[0], made.error


def _let_go(former: Former) -> None:
    """Frees what this rank trained with, before as much is made again."""
    training, former.training = former.training, None
    size = 0 if training is None else sum(p.nbytes for p in training.model.parameters())
    del training
    if size > _WORTH_COLLECTING:
        gc.collect()


def _account(former: Former) -> dict[str, Any]:
    """What this rank has left, in words that all understand."""
    done = former.training.update.done if former.training is not None and former.writes() else None
    return {
        "run": None if former.run is None else str(former.run),
        "place": None if former.place is None else asdict(former.place),
        "done": done,
    }


def _choose(former: Former, place: Place, told: list[dict[str, Any]]) -> tuple[int, list[int]] | None:
    """The step and the ranks of the job before that write what they hold; None if this one does not."""
    if former.training is None or former.place is None:
        return None
    # One that has waited since an earlier job is behind.
    latest = max(each["place"]["epoch"] for each in told if each["place"] is not None)
    done = {
        each["place"]["rank"]: each["done"]
        for each in told
        if each["done"] is not None and each["place"]["epoch"] == latest
    }
    schedule = pl.engine_of(former.training.model).schedule
    chosen = choose_writers(schedule, done) if former.place.epoch == latest and done else None
    return chosen if chosen is not None and former.place.rank in chosen[1] else None


def _write(former: Former, place: Place, chosen: tuple[int, list[int]] | None) -> dict[str, Any] | None:
    """Writes what this rank holds, if it is `chosen`: where, and the files."""
    if chosen is None or former.training is None:
        return None
    step, writers = chosen
    training = former.training
    folder = step_folder(Path(place.memory), step)
    folder.mkdir(parents=True, exist_ok=True)
    engine, extra = pl.engine_of(training.model), training.checkpoints.extra()
    files = write_held(folder, engine, training.update.optimizer, extra, writers)
    return {"path": str(folder), "files": files}


def _commit(former: Former, folder: Path, chosen: tuple[int, list[int]] | None) -> tuple[str, int] | None:
    """Makes a checkpoint of what was written: the name and bytes of the file that does so."""
    assert former.training is not None and chosen is not None
    made = commit_held(folder, pl.engine_of(former.training.model), *chosen)
    return made.name, made.stat().st_size


def _copied(folder: Path, files: Sequence[tuple[int, str, int]], world: pl.World) -> None:
    if problem := hand_on(folder, files, world):
        raise OSError(problem)


def _nothing() -> None:
    """What ranks do that have nothing to do."""


class _Agreed(NamedTuple):
    values: list[Any]
    error: str


def _agreed(work: Callable[[], Any], label: str) -> _Agreed:
    """What every rank's work returns, and what went wrong on any, which is then no reason to stop."""
    value, mine = None, ""
    try:
        value = work()
    except (OSError, UserError) as error:
        mine = str(error) or type(error).__name__
    told = pl.all_gather_json([value, mine], label)
    return _Agreed([each for each, _ in told], next((words for _, words in told if words), ""))


def _has_checkpoint(run: Path) -> bool:
    try:
        return bool(checkpoints_in(run / CHECKPOINTS))
    except UserError:
        return False
