"""The model that `paceline verify --matrix` compares."""

from __future__ import annotations

from paceline.models.presets import preset
from paceline.models.transformer import Transformer


def build() -> Transformer:
    """The smallest Transformer that still has every part."""
    return Transformer(preset("nano"))
