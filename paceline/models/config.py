"""The shape of a decoder-only Transformer, as data that checks itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import UserError

LARGEST = 10**8
"""Of any size of a model: the bytes of a weight of two such dimensions can still be counted in 64 bits."""


@dataclass(frozen=True)
class ModelConfig:
    """A pre-LN decoder: GPT-2's shape by default, Llama's with rmsnorm, rotary, swiglu and no biases.

    Raises:
        UserError: A combination of numbers that describes no model; the message says what would do.
    """

    layers: int = 3
    """Number of blocks, each attention and feed-forward."""
    width: int = 128
    """Width of the residual stream, a multiple of heads."""
    heads: int = 4
    """Query heads in each attention layer."""
    kv_heads: int = 0
    """Key/value heads, a divisor of heads (grouped-query attention); 0 means as many as heads."""
    ff: int = 0
    """Inner width of the feed-forward layer; 0 means 4 * width (swiglu needs it given)."""
    context: int = 128
    """Longest sequence in tokens."""
    vocabulary: int = 2048
    """Number of distinct tokens."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each sublayer and before the output layer."""
    position: Literal["learned", "rotary"] = "learned"
    """A learned vector per position, or queries and keys rotated by their position."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Feed-forward non-linearity: exact GELU, its approximation by tanh, as in the published GPT-2, or SiLU of one
    projection times another."""
    bias: bool = True
    """Whether linear layers (the output layer excepted) and layernorm carry biases."""
    tied: bool = True
    """Whether the output layer shares the token embedding's weight."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies; unused with learned positions."""
    norm_eps: float = 1e-5
    """Added to the variance (layernorm) or mean square (rmsnorm) before the square root."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("kv_heads", "ff"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be 0 (derive it) or positive, got {getattr(self, name)}.")
        for name in ("layers", "width", "heads", "context", "vocabulary", "kv_heads", "ff"):
            if getattr(self, name) > LARGEST:
                raise UserError(f"{name} must be at most {LARGEST:,}, got {getattr(self, name)}.")
        for name, allowed in (
            ("norm", ("layernorm", "rmsnorm")),
            ("position", ("learned", "rotary")),
            ("activation", ("gelu", "gelu_tanh", "swiglu")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be {' or '.join(allowed)}, got {getattr(self, name)!r}.")
        if self.width % self.heads:
            raise UserError(
                f"width must be a multiple of heads, got width {self.width} with {self.heads} heads: "
                f"use width {_nearest_multiples(self.width, self.heads)}, "
                f"or heads {_nearest_divisors(self.width, self.heads)}."
            )
        if self.heads % self.key_value_heads:
            raise UserError(
                f"kv_heads must divide heads, got {self.kv_heads} for {self.heads} heads: "
                f"use {_nearest_divisors(self.heads, self.kv_heads)}."
            )
        if self.position == "rotary" and self.head_width % 2:
            raise UserError(
                f"rotary positions turn pairs of numbers, so width / heads must be even, got "
                f"{self.width} / {self.heads} = {self.head_width}: "
                f"use width {_nearest_multiples(self.width, 2 * self.heads)}."
            )
        if self.activation == "swiglu" and not self.ff:
            raise UserError(
                f"swiglu needs ff, its inner width: Llama uses about 8/3 * width, here {_llama_ff(self.width)}."
            )
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be positive and finite, got {getattr(self, name)}.")

    @property
    def key_value_heads(self) -> int:
        """Key/value heads with the default resolved."""
        return self.kv_heads or self.heads

    @property
    def feed_forward(self) -> int:
        """Inner width of the feed-forward layer with the default resolved."""
        return self.ff or 4 * self.width

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


_LARGEST_TRIED = 100_000


def _nearest_multiples(number: int, base: int) -> str:
    """The multiples of `base` on either side of `number`, in words."""
    below = number // base * base
    return f"{below} or {below + base}" if below else str(base)


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of `number` on either side of `wanted`, in words."""
    # Those that are small, and what they leave: enough for any model, and for a slip of the keyboard no long search.
    small = [d for d in range(1, min(math.isqrt(number), _LARGEST_TRIED) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)


def _llama_ff(width: int) -> int:
    """8/3 * width rounded up to a multiple of 32."""
    return -(-8 * width // 96) * 32
