"""Training that goes on when a rank is lost, from what the other ranks hold in memory or the latest checkpoint."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in
from paceline.checkpoint.saving import abandon_earlier
from paceline.comm.devices import strategy_on
from paceline.comm.patience import end_waits_when
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.data import prepared
from paceline.launch.cores import threads_per_rank
from paceline.launch.seat import Place, Seat
from paceline.launch.stop import StopRequest
from paceline.launch.worker import lost_a_peer
from paceline.train.build import build_model, make_update
from paceline.train.config import TrainConfig
from paceline.train.forecast import begin
from paceline.train.former import Former
from paceline.train.held_checkpoint import checkpoint_of_held
from paceline.train.interruption import Interruption
from paceline.train.resume import Resume, find_resume


class LeaveJob(Exception):
    """The ranks leave the job between two steps, to form one with more ranks."""


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
    path, error = checkpoint_of_held(former, place, told)
    former.free()
    if path is not None and not error:
        return Found(Resume(run, path))
    checkpoints = pl.all_gather_json(_has_checkpoint(run), "whether the run has a checkpoint")[0]
    return Found(Resume(run, run / CHECKPOINTS if checkpoints else None))


def _account(former: Former) -> dict[str, Any]:
    """What this rank has left, in words that all understand."""
    return {
        "run": None if former.run is None else str(former.run),
        "place": None if former.place is None else asdict(former.place),
        "done": former.done,
        "is_whole": former.kept is not None,
    }


def _has_checkpoint(run: Path) -> bool:
    try:
        return bool(checkpoints_in(run / CHECKPOINTS))
    except UserError:
        return False
