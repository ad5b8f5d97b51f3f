"""Training that goes on when a rank is lost, from what the other ranks hold in memory or the latest checkpoint."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline as pl
from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in, step_folder
from paceline.checkpoint.hand_on import hand_on
from paceline.checkpoint.save import abandon_earlier
from paceline.checkpoint.survivors import choose_writers, commit_held, is_writable, write_held
from paceline.comm.devices import strategy_on
from paceline.comm.patience import end_waits_when
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.data import Corpus, prepared
from paceline.launch.cores import threads_per_rank
from paceline.launch.seat import Place, Seat
from paceline.launch.stop import StopRequest
from paceline.launch.worker import lost_a_peer
from paceline.train.build import build_model, make_update
from paceline.train.config import TrainConfig
from paceline.train.forecast import begin
from paceline.train.interruption import Interruption
from paceline.train.kept import Kept, kept_of
from paceline.train.resume import Resume, find_resume
from paceline.train.training import Training

_WORTH_COLLECTING = 64 << 20
"""Bytes of a model from which on memory that only the garbage collector frees is worth its milliseconds."""


class LeaveJob(Exception):
    """The ranks leave the job between two steps, to form one with more ranks."""


@dataclass
class Former:
    """What is left in this process of the job that it was in before.

    Attributes:
        stop: Remembers a stop that is asked for, also between two jobs.
        run: The run's folder, once it is known.
        corpus: The run's text, once it was opened.
        training: What this rank trained with, where it came so far.
        kept: The same, out of its job, where this rank holds all of it; then there is no `training`.
        before: Bytes that this rank held before it had a model.
        place: Its place in that job.
        saved: When the latest checkpoint began, or the run, in seconds on the host's monotonic clock.
        left: When it left, in seconds on the host's monotonic clock.
        interruption: What going on takes, or took the last time.
        is_settled: Whether what was imported is kept out of the garbage collector's sight.
    """

    stop: StopRequest
    run: Path | None = None
    corpus: Corpus | None = None
    training: Training | None = None
    kept: Kept | None = None
    before: int | None = None
    place: Place | None = None
    saved: float | None = None
    left: float | None = None
    interruption: Interruption | None = None
    is_settled: bool = False

    def settle_imports(self) -> None:
        """What was imported is not looked at any more when memory is collected: that takes milliseconds then."""
        if not self.is_settled:
            self.is_settled = True
            gc.freeze()

    def did(self, part: str) -> None:
        """Counts what has passed as this part of an interruption, if there is one."""
        if self.interruption is not None and not self.interruption.is_over:
            self.interruption.did(part)

    @property
    def done(self) -> int | None:
        """After how many steps it is what this rank can hand on; None if it can hand on nothing."""
        if self.kept is not None:
            return self.kept.update.done
        if self.training is None or not is_writable(pl.engine_of(self.training.model)):
            return None
        return self.training.update.done

    def holds(self) -> str:
        """The same for ranks that hold the same elements after the same step."""
        if self.kept is not None:
            return f"all after step {self.kept.update.done}"
        if self.training is None:
            return ""
        schedule = pl.engine_of(self.training.model).schedule
        shard = schedule.rank if schedule.has_server else schedule.shard_index
        return f"shard {shard} after step {self.training.update.done}"

    def leave(self) -> None:
        """The job is over: keeps what there is without it."""
        if self.training is not None:
            self.saved = self.training.checkpoints.since
        if self.training is not None and (kept := kept_of(self.training)) is not None:
            self.training, self.kept = None, kept
            _collect(sum(p.nbytes for p in kept.model.parameters()))
        elif self.kept is not None:
            self.kept.leave()

    def begins(self, training: Training, run: Path) -> None:
        """The next job is about to do steps."""
        self.training, self.kept = training, None
        self.run, self.corpus, self.before = run, training.corpus, training.forecast.before


def train_in_places(config: TrainConfig, seat: Seat) -> int:
    """Trains as the rank that the launcher says, in one job after the other; returns the exit status.

    Raises:
        Exception: What ends the run: whatever is not the loss of another rank.
    """
    from paceline.train.loop import train

    end_waits_when(seat.why_broken)
    with StopRequest() as stop:
        former = Former(stop)
        while (
            place := seat.take_place(partial(_warm_up, config, former), former.holds(), former.done or 0)
        ) is not None:
            former.did("place")
            try:
                return train(config, former, seat)
            except LeaveJob:
                pass
            except Exception as error:
                if not lost_a_peer(error):
                    raise
            former.place, former.left = place, time.monotonic()
            is_new = former.interruption is None or former.interruption.is_over
            if is_new and seat.stepped is not None:
                former.interruption = Interruption(seat.stepped)
            former.did("noticing")
            abandon_earlier()
            former.leave()
            pl.shutdown()
            former.did("leaving")
    return 0


def _warm_up(config: TrainConfig, former: Former) -> None:
    """Does all that a spare can do before its time comes: opens the text, and trains a step of one layer of the model.

    So that what a rank needs is imported, and what computes it is chosen, by shapes, and ready.
    """
    # What is wrong with the text its ranks say, or will when it is one.
    with contextlib.suppress(UserError):
        former.corpus = prepared(config.data)
    world = pl.init()
    torch.set_num_threads(threads_per_rank(config.threads, config.workers or 1))
    begin(world)
    if former.corpus is not None:
        strategy = Strategy(gradients="sum", precision=config.strategy.precision)
        small = replace(config, model=replace(config.model, layers=1), strategy=strategy_on(strategy, world.device))
        model = build_model(small, former.corpus, world)
        update, engine = make_update(small, model, world), pl.engine_of(model)
        tokens = torch.zeros(config.micro_batch, model.config.context, dtype=torch.int64, device=world.device)
        for batch in pl.accumulate(model, [tokens]):
            loss = model(batch, batch)
            engine.count(batch.numel(), loss)
            loss.backward(update.scale)
        counts = engine.counts()
        update(0, counts[0], counts[1], engine.reduced_norm())
        pl.release(model)
        del model, update, engine, loss, counts
    pl.shutdown()
    gc.collect()
    former.settle_imports()


@dataclass(frozen=True)
class Found:
    """What a job goes on from.

    Attributes:
        resume: As `find_resume`, of the run that the job before trained.
        is_kept: Whether rank 0 holds all of it, from which the others have it that lack it.
        has_all: Whether this rank does.
        someone_lacks: Whether any does not.
    """

    resume: Resume | None
    is_kept: bool = False
    has_all: bool = False
    someone_lacks: bool = False


def go_on(config: TrainConfig, former: Former, place: Place) -> Found:
    """What a job goes on from, which may have lost ranks of the one before, or be the first. A collective call.

    Where rank 0 holds all of it, that is all. Else ranks that were in the job before write what they hold into the
    folder in memory, where the strategy replicates it; if not, a lost rank's shards are lost with it, and the latest
    checkpoint has to do.
    """
    told: list[dict[str, Any]] = pl.all_gather_json(_account(former), "what ranks have left of the job before")
    runs = [each["run"] for each in told if each["run"] is not None]
    if place.work:
        # Known to the launcher where all ranks were lost.
        runs.append(place.work)
    if not runs:
        former.training = former.kept = None
        return Found(find_resume(config))
    run = former.run = Path(runs[0])
    # One that has waited since an earlier job is behind.
    latest = max((each["place"]["epoch"] for each in told if each["place"] is not None), default=-1)
    states = [(each["is_whole"], each["place"] and each["place"]["epoch"], each["done"]) for each in told]
    have = [state == (True, latest, states[0][2]) for state in states]
    if have[0]:
        if not have[place.rank]:
            # What is half received must not be handed on.
            former.training = former.kept = None
        return Found(Resume(run, None, is_kept=True), True, have[place.rank], not all(have))
    path, error = _memory(former, place, told)
    _let_go(former)
    if path is not None and not error:
        return Found(Resume(run, path))
    checkpoints = pl.all_gather_json(_has_checkpoint(run), "whether the run has a checkpoint")[0]
    return Found(Resume(run, run / CHECKPOINTS if checkpoints else None))


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
    held = former.training or former.kept
    former.training, former.kept = None, None
    if held is not None:
        size = sum(p.nbytes for p in held.model.parameters())
        del held
        _collect(size)


def _collect(size: int) -> None:
    """Frees what a model of so many bytes has left."""
    if size > _WORTH_COLLECTING:
        gc.collect()


def _account(former: Former) -> dict[str, Any]:
    """What this rank has left, in words that all understand."""
    return {
        "run": None if former.run is None else str(former.run),
        "place": None if former.place is None else asdict(former.place),
        "done": former.done,
        "is_whole": former.kept is not None,
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
