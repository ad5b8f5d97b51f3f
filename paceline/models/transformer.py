"""The reference Transformer: one pre-LN decoder for GPT-2's and Llama's shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.config import ModelConfig
from paceline.models.head import Head
from paceline.models.on_meta import undrawn

INIT_STD = 0.02
"""Standard deviation of GPT-2's initial weights (Radford et al. 2019)."""


@dataclass
class LayerCache:
    """Keys and values of the tokens one layer has seen, each (batch, kv_heads, context, head_width)."""

    keys: Tensor
    values: Tensor

    def extend(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store (batch, kv_heads, n, head_width) at `start`; return all keys and values up to there."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass
class Cache:
    """Keys and values of every layer, so that generating a token costs one token's work."""

    layers: list[LayerCache]
    length: int = 0
    """Tokens stored so far."""


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values come from one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.key_value_heads
        self.head_width = config.head_width
        self.qkv = _linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width, config.bias)
        self.out = _linear(config.width, config.width, config.bias)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        """(batch, tokens, width) -> the same shape; `start` is the first token's position in `cache`."""
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, -1, self.head_width)
        if rotation is None:
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        else:
            qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            q, k = rotate(qk, rotation).split([self.heads, self.kv_heads], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(start, k, v)
        # With a cache, either it was empty and the mask is the usual one, or one token sees all.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=start == 0, enable_gqa=self.heads != self.kv_heads)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return y


class FeedForward(nn.Module):
    """GELU between two projections, or SwiGLU (Shazeer 2020) with gate and value in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        # The exact GELU is the default: on CPU it takes half the time of the approximation.
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        inner = config.feed_forward
        self.up = _linear(config.width, 2 * inner if self.gated else inner, config.bias)
        self.down = _linear(inner, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> the same shape."""
        x = self.up(x)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = F.silu(gate) * value
        else:
            x = F.gelu(x, approximate=self.approximate)
        y: Tensor = self.down(x)
        return y


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config)
        self.feed_forward = FeedForward(config)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, cache: LayerCache | None = None, start: int = 0
    ) -> Tensor:
        """(batch, tokens, width) -> the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation, cache, start)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Transformer(nn.Module):
    """Token embedding, blocks, final norm, output layer.

    Built under `torch.device("meta")` it costs nothing; `to_empty(device=...)` then `initialise()`
    give it the weights it would have had.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config.vocabulary, config.width)
        self.positions = _embedding(config.context, config.width) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = Head(config.width, config.vocabulary)
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights as GPT-2 does (Radford et al. 2019).

        Normal with standard deviation 0.02; the projections that write to the residual stream are
        scaled by 1/sqrt(2 * layers), so that its variance does not grow with depth. Biases 0, norms 1.

        Args:
            generator: Source of randomness, torch's default one if None.
        """
        self.tie()
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                to_residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                parameter.normal_(0.0, residual_std if to_residual else INIT_STD, generator=generator)

    def tie(self) -> None:
        """Lets the output layer have the embedding's weight where it is to: moving off the meta device parts them."""
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Predict the token after each token.

        Args:
            tokens: (batch, n) int64, n at most the context.
            targets: (batch, n) int64, the token to predict at each place, -100 where none counts.
            cache: Keys and values of earlier tokens, extended by these. Unless it is empty, n is 1.

        Returns:
            With targets the cross-entropy in nats SUMMED over the counted targets, a float32 scalar
            (float64 for a float64 model); without, logits (batch, n, vocabulary).

        Raises:
            ValueError: More tokens than the context holds, or several tokens onto a filled cache.
        """
        start = cache.length if cache is not None else 0
        count = tokens.shape[1]
        if start + count > self.config.context:
            raise ValueError(f"{start + count} tokens exceed the model's context of {self.config.context}.")
        if start and count != 1:
            raise ValueError(f"A filled cache takes one token at a time, got {count}.")
        x: Tensor = self.embedding(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(start, start + count, device=x.device))
        else:
            rotation = rotation_at(start, count, self.config, x)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, cache.layers[index] if cache is not None else None, start)
        if cache is not None:
            cache.length += count
        y: Tensor = self.head(self.norm(x), targets)
        return y

    def empty_cache(self, batch: int = 1) -> Cache:
        """Room for `context` tokens of `batch` sequences, in the weights' dtype and on their device."""
        c, weight = self.config, self.embedding.weight
        shape = (batch, c.key_value_heads, c.context, c.head_width)
        return Cache([LayerCache(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.blocks])


Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines, each (tokens, 1, head_width): what `rotate` multiplies by."""


def rotation_at(start: int, count: int, config: ModelConfig, like: Tensor) -> Rotation:
    """Angles of positions start ... start + count - 1: position * theta^(-2i/d) for pair i of d/2.

    Su et al. 2021, in float32 or better for weights of any dtype: at position 8000 a bfloat16 angle
    would be off by whole turns. Computed anew in each pass, so that no buffer needs moving or saving.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    half = config.head_width // 2
    pair = torch.arange(half, dtype=dtype, device=like.device)
    position = torch.arange(start, start + count, dtype=dtype, device=like.device)
    angle = torch.outer(position, config.rope_theta ** (-pair / half)).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (batch, tokens, heads, d) by their position's angles."""
    cos, signed_sin = rotation
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin).to(x.dtype)


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    # Transformer.initialise draws the weights: torch's own draw would cost time and random numbers.
    return undrawn(lambda: nn.Linear(inputs, outputs, bias=bias), torch.get_default_device())


def _embedding(rows: int, width: int) -> nn.Embedding:
    return undrawn(lambda: nn.Embedding(rows, width), torch.get_default_device())


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
