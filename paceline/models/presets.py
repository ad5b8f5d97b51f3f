"""Named model shapes."""

from __future__ import annotations

import difflib

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig


def _gpt2(layers: int, width: int, heads: int) -> ModelConfig:
    return ModelConfig(layers=layers, width=width, heads=heads, context=1024, vocabulary=50257)


def llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ff: int,
    context: int = 8192,
    vocabulary: int = 128_256,
    tied: bool = False,
    rope_theta: float = 500_000.0,
) -> ModelConfig:
    """A Llama's shape, of Llama 3's vocabulary and positions by default; the arguments are as in `ModelConfig`."""
    return ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        context=context,
        vocabulary=vocabulary,
        norm="rmsnorm",
        position="rotary",
        activation="swiglu",
        bias=False,
        tied=tied,
        rope_theta=rope_theta,
    )


PRESETS: dict[str, ModelConfig] = {
    # Smallest that still has every part: for smoke tests.
    "nano": ModelConfig(layers=2, width=64, heads=2, context=64, vocabulary=512),
    # 0.87 M parameters: learns source code on two CPU cores in two minutes.
    "tiny": ModelConfig(layers=3, width=128, heads=4, context=128, vocabulary=2048),
    # 5.9 M parameters: half an hour to an hour on a CPU.
    "small": ModelConfig(layers=6, width=256, heads=4, context=256, vocabulary=4096),
    "gpt2-124m": _gpt2(layers=12, width=768, heads=12),
    "gpt2-350m": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-1.5b": _gpt2(layers=48, width=1600, heads=25),
    "llama-1b": llama(layers=16, width=2048, heads=32, kv_heads=8, ff=8192, tied=True),
    "llama-8b": llama(layers=32, width=4096, heads=32, kv_heads=8, ff=14336),
    "llama-70b": llama(layers=80, width=8192, heads=64, kv_heads=8, ff=28672),
    "llama2-7b": llama(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=32,
        ff=11008,
        context=4096,
        vocabulary=32_000,
        rope_theta=10_000.0,
    ),
}
"""Shapes by name. The gpt2 and llama ones have the published models' parameter counts."""


def preset(name: str) -> ModelConfig:
    """The shape called `name`.

    Raises:
        UserError: No such preset; the message names the nearest one and lists them all.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(f"There is no model preset {name!r}: {hint}Known presets: {', '.join(PRESETS)}.")
