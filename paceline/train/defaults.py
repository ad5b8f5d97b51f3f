"""Training settings that fit each model preset."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from paceline.models.config import ModelConfig
from paceline.models.presets import preset
from paceline.train.config import TrainConfig
from paceline.train.sections import LogConfig, ModelSection, OptimConfig


def _gpt2(lr: float) -> dict[str, Any]:
    # Half a million tokens a step, as Brown et al. 2020 used at this size, with their learning rates.
    return {
        "steps": 20_000,
        "batch": 512,
        "micro_batch": 8,
        "optim": OptimConfig(lr=lr, warmup=0.02, final_lr_fraction=0.1),
        "log": LogConfig(every=10, validate_every=1000, events_every=1000),
    }


def _llama(lr: float) -> dict[str, Any]:
    # Four million tokens a step and the learning rates of Touvron et al. 2023.
    return {
        "steps": 100_000,
        "batch": 512,
        "micro_batch": 1,
        "optim": OptimConfig(lr=lr, warmup=2000, final_lr_fraction=0.1),
        "log": LogConfig(every=10, validate_every=1000, events_every=1000),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "nano": {"steps": 200, "log": LogConfig(every=20, validate_every=100, events_every=100)},
    "tiny": {},
    "small": {
        "steps": 1500,
        "batch": 16,
        "micro_batch": 4,
        "optim": OptimConfig(lr=2e-3),
        "log": LogConfig(every=50, validate_every=500, events_every=1000),
    },
    "gpt2-124m": _gpt2(6e-4),
    "gpt2-350m": _gpt2(3e-4),
    "gpt2-1.5b": _gpt2(2e-4),
    "llama-1b": _llama(3e-4),
    "llama-8b": _llama(3e-4),
    "llama-70b": _llama(1.5e-4),
    "llama2-7b": _llama(3e-4),
}
"""What differs from TrainConfig's own defaults, which are tiny's."""


def defaults(name: str) -> TrainConfig:
    """The configuration that `--model.preset name` stands for.

    The tokenizer gets as many entries as the preset's vocabulary, and the model as many as the tokenizer.

    Raises:
        UserError: No such preset.
    """
    shape = preset(name)
    values = {item.name: getattr(shape, item.name) for item in fields(ModelConfig)}
    config = TrainConfig(model=ModelSection(**{**values, "vocabulary": 0, "preset": name}))
    return replace(config, data=replace(config.data, vocabulary=shape.vocabulary), **SETTINGS.get(name, {}))
