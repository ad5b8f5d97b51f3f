"""Memory of PyTorch's FSDP2 as torchtitan uses it, by formula: what its allocator reserves at most in a step.

PyTorch's allocator keeps a pool for each stream, and what one has had no other takes (read in torch's
`fsdp/_fully_shard/_fsdp_collectives.py`): whole parameters are gathered on a stream of their own, and gradients are
left on that which reduces them. So what is reserved is the sum of the pools' fullest moments. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.config import ModelConfig
from paceline.plan.llama_memory import Kept, block_bytes, block_parameters, stage_parameters


@dataclass(frozen=True)
class Fsdp2:
    """A run, as far as memory depends on it: parameters in fp32, computed with in bf16, gradients reduced in fp32.

    Attributes:
        config: The model; its context is the run's.
        samples: Sequences that a rank takes at once: of a pipeline, all of its micro-batches.
        shards: Ranks that divide parameters, gradients and optimizer states.
        tensor: Ranks that share each matmul, and norms and residuals by tokens.
        pipeline: Stages; their parameters stay gathered through a step.
        context_ranks: Ranks that share a sequence.
        kept: What a block keeps for backward, where it is recomputed.
        recomputed: Share of the blocks to which that applies; the others keep all.
        compiled: Whether blocks are compiled.
        compiled_loss: Whether the loss is, too.
        micro_batches: In how many parts a pipeline takes them.
    """

    config: ModelConfig
    samples: int
    shards: int
    tensor: int = 1
    pipeline: int = 1
    context_ranks: int = 1
    kept: Kept = "all"
    recomputed: float = 1.0
    compiled: bool = False
    compiled_loss: bool = False
    micro_batches: int = 1

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.samples * self.config.context / self.context_ranks

    @property
    def parameters(self) -> float:
        """Parameters of this rank's stage and its part of each matrix, before they are divided."""
        return stage_parameters(self.config, self.pipeline) / self.tensor

    @property
    def activations(self) -> float:
        """Bytes kept for backward when the loss is computed; of stages, on the first, which has most in flight."""
        whole = block_bytes(self.config, self.tokens, self._whole, self.tensor)
        less = block_bytes(self.config, self.tokens, self.kept, self.tensor) if self.kept != "all" else whole
        blocks = self.config.layers / self.pipeline * min(self.pipeline, self._split)
        return blocks * (self.recomputed * less + (1 - self.recomputed) * whole) / self._split

    @property
    def _split(self) -> int:
        return self.micro_batches if self.pipeline > 1 else 1

    @property
    def _whole(self) -> Kept:
        return "compiled" if self.compiled else "all"

    @property
    def logits(self) -> float:
        """Bytes that are reserved for the logits at the loss.

        Those in bf16, and in fp32 eager cross-entropy's logarithms and two gradients, or three numbers more beside the
        logarithms where tensor ranks share the vocabulary (torch's `tensor/parallel/loss.py`); compiled, their
        gradient in bf16 alone. What bf16 leaves is too small a piece for fp32.
        """
        each = 4 if self.compiled_loss else 14 if self.tensor == 1 else 18
        return each * self.tokens * self.config.vocabulary / self.tensor / self._split

    @property
    def accumulated(self) -> float:
        """Bytes of whole gradients in fp32 that a stage's micro-batches add up to, reduced after the last one alone.

        torch's pipelines run each backward without reducing (`backward_maybe_with_nosync` in `pipelining/stage.py`),
        where FSDP2 keeps `unsharded_accumulated_grad` in what it reduces in (`_fsdp_param.py`).
        """
        return 4 * self.parameters if self.pipeline > 1 else 0.0

    @property
    def reserved(self) -> float:
        """Bytes that the allocator reserves at most: the pools of computing, gathering and reducing."""
        block = block_parameters(self.config) / self.tensor
        head = self.config.vocabulary * self.config.width / self.tensor
        states = 12 * self.parameters / self.shards
        if self.pipeline > 1:
            whole, gathering = 2 * self.parameters, 2 * (head + block)
        else:
            # The output layer, the block that computes and the one that comes next.
            whole, gathering = 2 * (head + 2 * block), 2 * (head + block)
        at_loss = self.activations + self.logits
        again = block_bytes(self.config, self.tokens / self._split, self._whole, self.tensor)
        # A block's gradients in bf16, and in fp32 that and the last one's on their way to be reduced; what a pass over
        # the inner activations holds at a time.
        passing = 4 * self.tokens / self._split * self.config.feed_forward / self.tensor
        in_block = self.activations + (again if self.kept != "all" else 0) + passing + 2 * block + 2 * 4 * block
        # The output layer's gradient in bf16, in fp32, and that of the logits.
        in_head = self.activations + 6 * head + 2 * self.tokens * self.config.vocabulary / self.tensor / self._split
        reserved = states + whole + max(at_loss, in_block, in_head) + gathering + 4 * self.parameters / self.shards
        return reserved + self.accumulated
