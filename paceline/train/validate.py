"""How well the model predicts held-out text, in a unit that does not depend on the tokenizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import paceline as pl
from paceline.data import TokenFile
from paceline.data.corpus import Facts
from paceline.data.loader import validation_batches
from paceline.data.samples import sample_count


@dataclass(frozen=True)
class Validation:
    """Figures of one pass over held-out text."""

    loss: float
    """Mean cross-entropy in nats per token."""
    tokens: int
    """Target tokens it was measured on, over all ranks."""
    bits_per_byte: float
    """Summed cross-entropy in bits over the bytes of the text. On a part of the text its bytes are taken as its
    share of the tokens."""
    share: float
    """Which part of the held-out text it was measured on, from 0 to 1."""
    seconds: float
    """Wall time."""

    def figures(self, text: Facts) -> dict[str, float | int]:
        """Figures by their names in a run's, with what compressing the held-out text takes."""
        return {
            "val/loss": self.loss,
            "val/bits_per_byte": self.bits_per_byte,
            "val/gzip_bits_per_byte": text.gzip_bits_per_byte,
            "val/xz_bits_per_byte": text.xz_bits_per_byte,
            "val/share": self.share,
            "val/seconds": self.seconds,
        }


@torch.no_grad()
def validate(
    model: nn.Module,
    text: TokenFile,
    *,
    context: int,
    micro_batch: int,
    samples: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Validation | None:
    """Measures the model on held-out text, shared out among the ranks. A collective call.

    Args:
        model: Maps (tokens, targets) to the summed loss.
        text: Held-out tokens.
        context: Tokens in a sample.
        micro_batch: Samples at once.
        samples: How many to take, evenly spread over the text, so that the number of ranks changes nothing; None for
            all.
        stopped: Asked before each micro-batch; where it says yes on any rank, the validation is given up.
        progress: Called before each micro-batch with how many this rank has done, and of how many.

    Returns:
        The same figures on every rank, or None if it was given up or the text has no sample.
    """
    began = time.perf_counter()
    world = pl.init()
    count = sample_count(len(text), context)
    count = count if samples is None else min(count, samples)
    each = math.ceil(math.ceil(count / world.world_size) / micro_batch)
    batches = validation_batches(
        text,
        context=context,
        micro_batch=micro_batch,
        samples=count,
        rank=world.rank,
        world_size=world.world_size,
        device=world.device,
    )
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    tokens, given_up = 0, False
    model.eval()
    try:
        for done, batch in enumerate(batches):
            progress(done, each)
            # Together: a rank that went on alone would wait for the others' parameters.
            if given_up := any(pl.all_gather_json(stopped(), "whether to stop validating")):
                break
            total += model(batch.inputs, batch.targets)
            tokens += batch.tokens
    finally:
        model.train()
    if given_up:
        return None
    sums = pl.all_gather_json([total.item(), tokens], "validation losses")
    nats, tokens = math.fsum(row[0] for row in sums), sum(row[1] for row in sums)
    if tokens == 0:
        return None
    share = tokens / (len(text) - 1)
    return Validation(
        loss=nats / tokens,
        tokens=tokens,
        bits_per_byte=nats / math.log(2) / (text.bytes * share),
        share=share,
        seconds=time.perf_counter() - began,
    )
