"""Memory of Megatron-LM's last pipeline stage by formula: what its allocator holds between steps and at its fullest.

Activations are those of Korthikanti et al. 2022, counted tensor by tensor: the norms' inputs and results and dropout's
masks on every tensor-parallel rank, what lies between a block's matmuls divided among them. At the fullest moment the
loss holds logits in 16 bits and in fp32. The last stage holds one micro-batch, with interleaved chunks one of the last
chunk and `group` of each earlier one (Narayanan et al. 2021). Beside tensors, libraries keep workspaces. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.models.config import ModelConfig

MIB = 2**20

DEFAULT_WORKSPACE = 8.125 * MIB
"""PyTorch's of cuBLAS for one handle and stream, by default (:4096:2:16:8)."""

WORKSPACE = 32 * MIB
"""The same on Hopper, and on any device where matmuls are to be deterministic (:4096:8)."""

TRANSFORMER_ENGINE = {"ampere": 4 * MIB, "hopper": 32 * MIB, "blackwell": 32 * MIB}
"""What Transformer Engine keeps for cuBLAS."""

LEFT_OVER = 3 * MIB
"""What a loop leaves between steps: the batch, losses, norms. Measured; it is less than 1 % of any run."""


@dataclass(frozen=True)
class Megatron:
    """A run of Megatron-LM, as far as memory depends on it.

    Attributes:
        config: The model; its context is the run's, its vocabulary is padded already.
        samples: Sequences of a micro-batch.
        tensor: Ranks that share each matmul.
        pipeline: Stages.
        context_ranks: Ranks that share a sequence.
        shards: Ranks that divide optimizer states: 1 without the distributed optimizer.
        chunks: Pieces of the model on each stage.
        chunk_layers: Blocks of each piece; by default as many as make the model.
        last_layers: Blocks of the last piece, where it has others.
        group: Micro-batches that a chunk takes before the next one's turn; the number of stages by default.
        sequence_parallel: Whether tensor ranks share norms and residuals by tokens.
        recompute: Whether each block is computed again from its input.
        dtype: What matmuls compute in.
        sharded: Whether parameters and gradients are divided as optimizer states are (Megatron's FSDP).
        transformer_engine: Whether blocks are Transformer Engine's; if not, Megatron's own.
        attention: "fused" by cuDNN, "flash", which works on another order of dimensions, or "unfused".
        norm_in_attention: Whether queries and keys are normalised, and kept before and after.
        deterministic: Whether matmuls' workspaces are those of deterministic algorithms.
        architecture: Of the device.
        fused_loss: Whether the loss is compiled, which keeps fp32 logits twice.
        deferred_logits: Micro-batches whose logits' gradients wait for the output layer's weight gradient.
    """

    config: ModelConfig
    samples: int
    tensor: int = 1
    pipeline: int = 1
    context_ranks: int = 1
    shards: int = 1
    chunks: int = 1
    chunk_layers: int = 0
    last_layers: int | None = None
    group: int = 0
    sequence_parallel: bool = False
    recompute: bool = False
    dtype: Literal["bfloat16", "float16", "float8"] = "bfloat16"
    sharded: bool = False
    transformer_engine: bool = True
    attention: Literal["fused", "flash", "unfused"] = "fused"
    norm_in_attention: bool = False
    deterministic: bool = False
    architecture: Literal["ampere", "hopper", "blackwell"] = "ampere"
    fused_loss: bool = False
    deferred_logits: int = 0

    @property
    def layers(self) -> int:
        """Blocks on the last stage."""
        return self._earlier + self._last

    @property
    def _earlier(self) -> int:
        """Blocks of the last stage's pieces but its last."""
        return (self.chunks - 1) * (self.chunk_layers or self.config.layers // self.pipeline // self.chunks)

    @property
    def _last(self) -> int:
        """Blocks of the model's last piece."""
        if self.last_layers is not None:
            return self.last_layers
        return self.chunk_layers or self.config.layers // self.pipeline // self.chunks

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return self.samples * self.config.context // self.context_ranks

    @property
    def stream(self) -> float:
        """Elements of the residual stream on this rank."""
        return self.tokens * self.config.width / (self.tensor if self.sequence_parallel else 1)

    # ---- what is held throughout

    @property
    def parameters(self) -> int:
        """On the last stage: its blocks, the final norm and the output layer; of a single stage, the embeddings too."""
        config, t = self.config, self.tensor
        h, inner = config.width, config.feed_forward
        qkv = (config.heads + 2 * config.key_value_heads) * config.head_width
        ups = 2 if config.activation == "swiglu" else 1
        norm = h if config.norm == "rmsnorm" else 2 * h
        block = (h * qkv + h * h + (ups + 1) * h * inner) // t + 2 * norm
        if config.bias:
            block += (qkv + ups * inner) // t + 2 * h
        vocabulary = config.vocabulary * h // t
        held = self.layers * block + norm + vocabulary
        if self.pipeline == 1:
            held += 0 if config.tied else vocabulary
            held += config.context * h if config.position == "learned" else 0
        return held

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and optimizer states while a micro-batch computes.

        With the distributed optimizer 6 + 12 / shards bytes a parameter: 2 computed with, 4 of gradients, and master
        and two states; 18 without. In fp16 gradients take 2.
        """
        gradient = 2 if self.dtype == "float16" else 4
        whole = 2 + gradient
        return self.parameters * ((whole + 12) / self.shards if self.sharded else whole + 12 / self.shards)

    @property
    def workspaces(self) -> float:
        """Bytes that libraries keep: cuBLAS for forward's and for backward's thread, and Transformer Engine."""
        small = self.architecture != "hopper" and not self.deterministic
        held = 2 * (DEFAULT_WORKSPACE if small else WORKSPACE)
        if self.transformer_engine:
            return held + TRANSFORMER_ENGINE[self.architecture]
        # Megatron's own attention multiplies queries by keys into a buffer that it keeps.
        return held + 2 * self.scores

    @property
    def scores(self) -> float:
        """Elements of the scores that materialised attention gives on this rank, in one block."""
        return self.samples * self.config.heads // self.tensor * self.config.context**2 / self.context_ranks

    @property
    def steady(self) -> float:
        """Bytes that are allocated between two steps."""
        held = self.states + self.workspaces
        if self.dtype == "float16":
            # Gradients in fp32, of which the optimizer's are copies.
            held += 4 * self.parameters / self.shards
        if self.pipeline > 1:
            # Each piece's last input and its gradient.
            held += self.chunks * 4 * self.stream
        return held + (LEFT_OVER if self.pipeline > 1 or self.shards == 1 else 0)

    # ---- what a step adds

    @property
    def block(self) -> float:
        """Bytes that a block keeps for backward."""
        config = self.config
        item = 1 if self.dtype == "float8" else 2
        qkv = (config.heads + 2 * config.key_value_heads) * config.head_width / config.width
        inner = config.feed_forward / config.width
        # Both norms' inputs, what they give to matmuls, and two masks of dropout.
        unshared = 4 + 2 * item + 2
        shared = 2 * qkv + 2 + (4 * inner if config.activation == "swiglu" else 2 * inner) + item * inner
        if self.dtype == "float8":
            shared += 1
        if self.norm_in_attention:
            shared += 2 * (config.heads + config.key_value_heads) * config.head_width / config.width
        if self.attention == "flash" and self.samples > 1:
            # What attention gives is put back into Megatron's order, and kept in both.
            shared += 2
        held = self.stream * unshared + self.tokens * config.width * shared / self.tensor
        # Softmax, dropout's mask and what it leaves.
        return held + (5 * self.scores if self.attention == "unfused" else 0)

    @property
    def logits(self) -> float:
        """Bytes of the logits in 16 bits and in fp32, on this rank."""
        elements = self.tokens * self.config.vocabulary / self.tensor
        return elements * ((10 if self.fused_loss else 6) + 2 * self.deferred_logits)

    @property
    def in_flight(self) -> int:
        """Blocks whose activations the last stage holds when the loss is computed."""
        return self._earlier * (self.group or self.pipeline) + self._last

    @property
    def beside(self) -> float:
        """Bytes beside blocks and logits: the final norm's input and result, the mask, and embedding or exchange."""
        mask = self.samples * self.config.context**2 / self.context_ranks
        return self.stream * (10 if self.pipeline > 1 else 6) + mask

    @property
    def peak(self) -> float:
        """Bytes that are allocated at the fullest moment: at the loss, or where a block is computed again."""
        throughout = self.states + self.workspaces + self.beside
        throughout += LEFT_OVER if self.pipeline > 1 or self.shards == 1 else 0
        if self.sharded:
            # The output layer and two blocks are whole, the block's gradients in fp32.
            config = self.config
            throughout += 2 * config.vocabulary * config.width / self.tensor
            throughout += 8 * 12 * config.width**2 / self.tensor
        if not self.recompute:
            return throughout + self.in_flight * self.block + self.logits
        inputs = self.in_flight * 2 * self.stream
        return throughout + inputs + max(self.logits, self.block)
