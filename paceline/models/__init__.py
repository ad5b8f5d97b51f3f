"""The reference Transformer: its shapes, costs, sampling and files.

What needs torch is in the submodules: the launcher reads configurations without it.
"""

from __future__ import annotations

from paceline.models.config import ModelConfig
from paceline.models.flops import flops_per_token, parameter_count, peak_flops
from paceline.models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "ModelConfig",
    "flops_per_token",
    "parameter_count",
    "peak_flops",
    "preset",
]
