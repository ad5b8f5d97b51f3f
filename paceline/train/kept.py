"""What a rank keeps of a job that is over, where it holds all of it: the model and its optimizer, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import paceline as pl
from paceline.checkpoint.plain import decode, encode
from paceline.data.samples import LeftOut
from paceline.hooks.plain_copies import ENGINE
from paceline.models.transformer import Transformer
from paceline.train.optim import Update
from paceline.train.training import Training


@dataclass
class Kept:
    """A training without its job.

    Attributes:
        model: A plain one.
        update: Its optimizer.
        left_out: Global batches that no step takes.
    """

    model: Transformer
    update: Update
    left_out: LeftOut = ()

    def leave(self) -> None:
        """Ends the model's engine, if it has one again, and forgets gradients of a step that was not done."""
        if getattr(self.model, ENGINE, None) is not None:
            pl.release(self.model)
        for parameter in self.model.parameters():
            parameter.grad = None


def kept_of(training: Training) -> Kept | None:
    """What is left of a training whose job is over; None where this rank holds shards, or in another way than others.

    Between GPUs too: an engine there ends only with those of all ranks.
    """
    engine = pl.engine_of(training.model)
    schedule, is_whole = engine.schedule, not engine.program.parameters.flat.managed
    is_alike = schedule.holders == schedule.world_size and not schedule.shares_memory
    if not is_whole or not is_alike or engine.world.backend == "nccl":
        return None
    kept = Kept(training.model, training.update, training.checkpoints.left_out)
    kept.leave()
    return kept


def share(kept: Kept, has_all: bool) -> None:
    """Gives the ranks that lack it what rank 0 holds, besides the weights: `pl.parallelize` has done that.

    A collective call. What other ranks hold as well they are sent into its place, where it changes nothing.

    Args:
        kept: Of this rank, with a model that is parallel.
        has_all: Whether it is as rank 0's; then it stays so.
    """
    aside: list[Tensor] = []

    def put(tensor: Tensor) -> str:
        aside.append(tensor.reshape(-1))
        return str(len(aside) - 1)

    update, engine, told = kept.update, pl.engine_of(kept.model), None
    if has_all:
        held = {
            "done": update.done,
            "optimizer": update.optimizer.state_dict(),
            "update": update.state_dict(),
            "left_out": kept.left_out,
        }
        encoded = encode(held, put, "the training")
        if engine.world.rank == 0:
            kinds = [[str(tensor.dtype).removeprefix("torch."), tensor.numel()] for tensor in aside]
            told = [encoded, kinds]
    theirs: Any = pl.all_gather_json(told, "what rank 0 holds")[0]
    if not has_all:
        aside = [
            torch.empty(numel, dtype=getattr(torch, dtype), device=engine.world.device) for dtype, numel in theirs[1]
        ]
    if engine.program.collectives is not None:
        engine.program.collectives.broadcast(aside, "what rank 0 holds")
    if not has_all:
        found = decode(theirs[0], lambda name: aside[int(name)])
        update.optimizer.load_state_dict(found["optimizer"])
        update.load_state_dict(found["update"])
        update.done, kept.left_out = found["done"], found["left_out"]
