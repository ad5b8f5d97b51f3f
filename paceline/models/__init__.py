"""The reference Transformer: its shapes, costs, sampling and files."""

from __future__ import annotations

from paceline.models.config import ModelConfig
from paceline.models.flops import flops_per_token, parameter_count, peak_flops
from paceline.models.generate import generate
from paceline.models.presets import PRESETS, preset
from paceline.models.transformer import Transformer
from paceline.models.weights import load_model, load_weights, save_weights

__all__ = [
    "PRESETS",
    "ModelConfig",
    "Transformer",
    "flops_per_token",
    "generate",
    "load_model",
    "load_weights",
    "parameter_count",
    "peak_flops",
    "preset",
    "save_weights",
]
