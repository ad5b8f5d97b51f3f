"""What a run is built from: its text, model, optimizer and batches."""

from __future__ import annotations

import time
import zlib

import torch

import paceline as pl
from paceline.comm.world import World
from paceline.data import Corpus, prepare
from paceline.data.loader import Loader
from paceline.data.samples import LeftOut
from paceline.launch.screen import show
from paceline.models.on_meta import undrawn
from paceline.models.transformer import Transformer
from paceline.train.config import TrainConfig
from paceline.train.dynamic_loss_scale import DynamicLossScale
from paceline.train.optim import Update

HEAD_START_SECONDS = 0.2


def prepare_text(config: TrainConfig, world: World, is_known: bool = False) -> Corpus:
    """The run's text, tokenised, or as it lies in the cache; rank 0 tells of it unless it is known."""
    if is_known:
        return prepare(config.data)
    if world.rank == 0:
        return prepare(config.data, report=show)
    # One process prepares while the others wait for its lock; it should be the one with the screen.
    time.sleep(HEAD_START_SECONDS)
    return prepare(config.data)


def text_marks(corpus: Corpus) -> dict[str, str | int]:
    """What texts differ in that give other samples, wherever they lie."""
    return {
        "tokens": corpus.facts.train.tokens,
        "tokenizer": zlib.crc32(corpus.definition.encode()),
        # A digest of all documents in order, and of how they are split.
        "content": corpus.folder.name,
    }


def build_model(config: TrainConfig, corpus: Corpus, world: World, has_weights: bool = True) -> Transformer:
    """The model, parallel. A collective call.

    Args:
        config: Its shape and strategy.
        corpus: The text.
        world: The job.
        has_weights: Whether this rank gives it its first values; not where rank 0 is known to hold others.
    """
    torch.manual_seed(config.seed)
    shape = config.model.shape(corpus.facts.vocabulary)
    if has_weights:
        with torch.device(world.device):
            model = Transformer(shape)
    else:
        model = undrawn(lambda: Transformer(shape), world.device)
        model.tie()
    return make_parallel(model, config, world)


def make_parallel(model: Transformer, config: TrainConfig, world: World) -> Transformer:
    """The same model, with rank 0's weights. A collective call."""
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    model = pl.parallelize(model, config.strategy)
    if world.device.type == "cuda":
        # What steps hold is what counts; whole parameters were there before they were cut.
        torch.cuda.reset_peak_memory_stats(world.device)
    return model


def make_update(config: TrainConfig, model: Transformer, world: World) -> Update:
    """The optimizer, with a loss scale where the precision needs one."""
    low, largest = config.strategy.precision == "float16", config.micro_batch * model.config.context
    loss_scale = DynamicLossScale(largest, world.device) if low else None
    return Update(model, config.optim, config.steps, world.device, loss_scale)


def open_loader(
    config: TrainConfig, corpus: Corpus, model: Transformer, world: World, first: int, left_out: LeftOut
) -> Loader:
    """This rank's batches, after step `first`, without those that are left out."""
    return Loader(
        corpus.train,
        context=model.config.context,
        batch_size=config.batch,
        micro_batch=config.micro_batch,
        rank=world.rank,
        world_size=world.world_size,
        seed=config.seed,
        first_step=first,
        left_out=left_out,
        device=world.device,
    )
