"""Activations that programs in plain PyTorch keep of a block with gated feed-forward, tensor by tensor. Pure."""

from __future__ import annotations

from typing import Literal

from paceline.models.config import ModelConfig

Kept = Literal["all", "compiled", "operations", "input"]
"""all: what eager operations save. compiled: elementwise operations are computed again from matmuls' results.
operations: attention's and every other matmul's result are kept, the rest computed again (torchtitan's selective
recomputation). input: the block's input alone."""


def block_bytes(config: ModelConfig, tokens: float, kept: Kept, tensor: int = 1, *, shared_norms: bool = True) -> float:
    """Bytes that one block keeps for backward, in 16 bits.

    Args:
        config: The model.
        tokens: Of a micro-batch on one rank.
        kept: What is kept.
        tensor: Ranks that share each matmul.
        shared_norms: Whether they also share norms and residuals by tokens (sequence parallelism).
    """
    h = config.width
    key_value = config.key_value_heads * config.head_width
    inner = config.feed_forward
    gated = config.activation == "swiglu"
    stream: float
    if kept == "input":
        stream, divided = h, 0.0
    elif kept == "operations":
        # The block's input and the last matmul's result; queries, values, gate and attention's result.
        stream, divided = 2 * h, h + key_value + inner + h
    else:
        # Both norms' inputs and what they give; queries, keys and values, repeated for the heads that share them, and
        # what attention gives; gate, its activation, the other projection, and their product.
        stream, divided = 4 * h, 4 * h + (4 if gated else 2) * inner
        if kept == "compiled":
            stream, divided = 2 * h, 4 * h + (2 if gated else 1) * inner
    return 2 * tokens * (stream / (tensor if shared_norms else 1) + divided / tensor)


def block_parameters(config: ModelConfig) -> int:
    """Elements of one block's weights."""
    h, ups = config.width, 2 if config.activation == "swiglu" else 1
    return h * (2 * h + 2 * config.key_value_heads * config.head_width) + (ups + 1) * h * config.feed_forward + 2 * h


def stage_parameters(config: ModelConfig, pipeline: int = 1) -> float:
    """Elements of a pipeline stage's weights: an even share of the blocks, and the embedding or the output layer."""
    vocabulary = config.vocabulary * config.width
    ends = (1 if config.tied else 2) * vocabulary if pipeline == 1 else vocabulary
    return config.layers / pipeline * block_parameters(config) + ends + config.width
