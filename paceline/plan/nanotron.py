"""Memory of nanotron by formula: what its allocator holds at most in a step.

Parameters are in bf16; gradients are there in bf16, in DDP's buckets too, and in an fp32 buffer that micro-batches add
to (read in its `optim/gradient_accumulator.py`); ZeRO-1 divides an fp32 master and Adam's two states. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.models.config import ModelConfig
from paceline.plan.llama_memory import Kept, block_bytes, block_parameters, stage_parameters


@dataclass(frozen=True)
class Nanotron:
    """A run, as far as memory depends on it.

    Attributes:
        config: The model; its context is the run's.
        samples: Sequences of a micro-batch.
        micro_batches: Of a step.
        data: Data-parallel ranks.
        zero: 1 where these divide optimizer states; 0 where each holds all.
        tensor: Ranks that share each matmul, and norms and residuals by tokens.
        pipeline: Stages; with one forward and one backward in turn, the first has as many micro-batches in flight.
        context_ranks: Ranks that share a sequence.
        kept: What a block keeps for backward.
    """

    config: ModelConfig
    samples: int
    micro_batches: int = 1
    data: int = 1
    zero: int = 1
    tensor: int = 1
    pipeline: int = 1
    context_ranks: int = 1
    kept: Kept = "all"

    @property
    def parameters(self) -> float:
        """Parameters of this rank, one of the first stage."""
        if self.pipeline == 1:
            return stage_parameters(self.config) / self.tensor
        embedding = self.config.vocabulary * self.config.width
        return (self.first_blocks * block_parameters(self.config) + embedding) / self.tensor

    @property
    def first_blocks(self) -> int:
        """Blocks of the first stage: up to the one with which it has more than its share of all multiplications.

        The output layer is among these, so other stages have more than the last one (its `models/base.py`).
        """
        block = block_parameters(self.config)
        share = (self.config.layers * block + self.config.vocabulary * self.config.width) / self.pipeline
        return min(self.config.layers, math.floor(share / block) + 1)

    @property
    def states(self) -> float:
        """Bytes held through a step: parameters, fp32 gradients, DDP's buckets, and the optimizer's share."""
        shards = self.data if self.zero else 1
        buckets = 2 if self.data > 1 else 0
        return self.parameters * (2 + 4 + buckets + 12 / shards)

    @property
    def peak(self) -> float:
        """Bytes allocated at most: on the first stage in flight, on the last at the loss, or with all gradients."""
        config = self.config
        tokens = self.samples * config.context / self.context_ranks
        block = block_bytes(config, tokens, self.kept, self.tensor)
        layers = config.layers / self.pipeline
        # Logits in bf16 and fp32, and fp32 ones that become the softmax.
        logits = 10 * tokens * config.vocabulary / self.tensor
        first = self.first_blocks * block * min(self.pipeline, self.micro_batches)
        again = block_bytes(config, tokens, "all", self.tensor) if self.kept == "input" else 0.0
        last = layers * block + max(logits, again)
        gradients = 2 * self.parameters
        if self.pipeline > 1:
            # Of later micro-batches gradients in bf16 are there only while backward runs.
            return self.states + max(first + again, last, gradients)
        return self.states + max(last, gradients)
