"""Training as the rank that the launcher says, in one job after the other, where each has lost or gained ranks."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import replace
from functools import partial

import torch

import paceline as pl
from paceline.checkpoint.saving import abandon_earlier
from paceline.comm.devices import strategy_on
from paceline.comm.patience import end_waits_when
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.data import prepared
from paceline.launch.cores import threads_per_rank
from paceline.launch.seat import Seat
from paceline.launch.stop import StopRequest
from paceline.launch.worker import lost_a_peer
from paceline.train.build import build_model, make_update
from paceline.train.config import TrainConfig
from paceline.train.failover import LeaveJob
from paceline.train.forecast import begin
from paceline.train.former import Former
from paceline.train.interruption import Interruption
from paceline.train.loop import train


def train_in_places(config: TrainConfig, seat: Seat) -> int:
    """Trains as the rank that the launcher says, in one job after the other; returns the exit status.

    Raises:
        Exception: What ends the run: whatever is not the loss of another rank.
    """
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
    begin(world, config.strategy.recompute != "none")
    if former.corpus is not None:
        strategy = Strategy(gradients="sum", precision=config.strategy.precision)
        small = replace(config, model=replace(config.model, layers=1), strategy=strategy_on(strategy, world.device))
        model = build_model(small, former.corpus, world)
        update, engine = make_update(small, model, world), pl.engine_of(model)
        tokens = torch.zeros(config.micro_batch, model.config.context, dtype=torch.int64, device=world.device)
        for batch in pl.accumulate(model, [tokens]):
            loss = model(batch, batch)
            engine.count(batch.numel(), loss)
            (loss * update.scale).backward()
        counts = engine.counts()
        update(0, counts[0], counts[1], engine.norm.as_reduced())
        pl.release(model)
        del model, update, engine, loss, counts
    pl.shutdown()
    gc.collect()
    former.settle_imports()
