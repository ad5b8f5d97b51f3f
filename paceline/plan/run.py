"""A training run as published tables describe it: model, batch, and how ranks share them, tensor and pipeline too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig
from paceline.plan.transformer_work import EAGER, Software

Recompute = Literal["none", "unit", "attention", "operations"]
"""What is computed again in backward: nothing; whole blocks; only attention, as Megatron's selective recomputation
does; or every other matmul and what lies between all of them, as torchtitan's does."""


@dataclass(frozen=True)
class Run:
    """What has to be known to predict a step of any published run.

    Attributes:
        config: The model; its context is the run's.
        devices: How many.
        samples: Sequences of a micro-batch.
        micro_batches: Of a step, on each rank.
        tensor: Ranks that share each matmul.
        pipeline: Stages of blocks.
        chunks: Pieces of the model on each stage, taken in turn (interleaved schedule).
        context_ranks: Ranks that share a sequence.
        zero: What data-parallel ranks divide, as `Strategy.zero`; 2 here keeps parameters from forward to backward.
        shard: Data-parallel ranks of a shard group; 0: all.
        recompute: What is computed again.
        recompute_share: Share of the blocks that this is done to.
        dtype: What matmuls compute in.
        gathered: Bytes of a parameter when it is gathered.
        reduced: Bytes of a gradient when it is reduced.
        overlap: Whether gradients and parameters move while blocks compute.
        overlap_tensor: Whether what tensor ranks exchange does.
        overlap_sent: Whether what stages send each other does, once all of them have something to compute.
        reduces_whole: Whether every rank gets all reduced gradients, even where it updates a part.
        bucket: Parameters whose gradients are reduced at a time, of those that are reduced once a step; 0: all.
        copied_parts: Tensors of a block of which every rank's part is copied by itself, where updated parameters are
            all gathered before the next step begins; 0: they are gathered as that goes on, and copied nowhere.
        added: Bytes that pass through memory for each parameter, in each micro-batch, to add its gradient to a sum.
        sequence_parallel: Whether tensor ranks share norms and residuals.
        sends_parts: Whether tensor ranks each send a part of what goes from stage to stage, and gather it there.
        software: How the program computes.
    """

    config: ModelConfig
    devices: int
    samples: int
    micro_batches: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context_ranks: int = 1
    zero: int = 0
    shard: int = 0
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    dtype: str = "bfloat16"
    gathered: int = 2
    reduced: int = 4
    overlap: bool = True
    overlap_tensor: bool = False
    overlap_sent: bool = False
    reduces_whole: bool = False
    bucket: int = 0
    copied_parts: int = 0
    added: int = 0
    sequence_parallel: bool = False
    sends_parts: bool = False
    software: Software = EAGER

    def __post_init__(self) -> None:
        cut = self.tensor * self.pipeline * self.context_ranks
        if self.devices % cut:
            raise UserError(f"expected devices that tp x pp x cp = {cut} divides, got {self.devices}")
        if self.config.layers % self.pipeline and self.config.layers < self.pipeline:
            raise UserError(f"expected at least a layer for each of {self.pipeline} stages, got {self.config.layers}")
        if self.config.heads % self.tensor:
            raise UserError(f"expected heads that tp = {self.tensor} divides, got {self.config.heads}")

    @property
    def data(self) -> int:
        """Data-parallel ranks: copies that see different samples."""
        return self.devices // (self.tensor * self.pipeline * self.context_ranks)

    @property
    def copies(self) -> int:
        """Ranks that hold the same parameters: data-parallel ones, and those that share a sequence."""
        return self.data * self.context_ranks

    @property
    def shards(self) -> int:
        """Those among which states are divided, of sequences' ranks too, as Megatron and torchtitan do."""
        return (self.shard or self.data) * self.context_ranks if self.zero else 1

    @property
    def tokens(self) -> int:
        """Tokens of a step on all devices."""
        return self.samples * self.micro_batches * self.data * self.config.context
