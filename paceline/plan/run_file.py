"""From the configuration of a run to how it makes a step, and from the recommended setting to a configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from paceline.core.errors import UserError
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate, Setting
from paceline.train.config import TrainConfig
from paceline.train.yaml_file import to_yaml


def setting_of(config: TrainConfig, ranks: int) -> Setting:
    """How a configuration makes a step, for the rank with the most samples."""
    share = share_of(config.batch, ranks)
    samples = min(config.micro_batch, share)
    return Setting(config.strategy, samples, math.ceil(share / samples))


def estimate_of(setting: Setting, case: Case, batch: int) -> Estimate:
    """What a configuration's setting costs where its last micro-batch is smaller: all take as long as their mean.

    Args:
        setting: As `setting_of` gives it.
        case: Model and machines.
        batch: Samples of a step over all devices.

    Raises:
        UserError: The setting does not suit the devices, or is not forecast.
    """
    if setting.strategy.share_parameters and not case.hardware.is_cpu:
        raise UserError(
            "strategy.share_parameters: GPUs have memory of their own each, so a run is refused there: leave it out"
        )
    if setting.strategy.wire != "full":
        raise UserError(
            f"strategy.wire={setting.strategy.wire} is not forecast: with wire=full the forecast is of gradients that "
            "are sent in full"
        )
    mean = math.ceil(share_of(batch, case.devices) / setting.micro_batches)
    if mean == setting.samples:
        return case.estimate(setting)
    alike = case.estimate(replace(setting, samples=mean))
    tokens = batch * case.subject.context
    return replace(alike, setting=setting, tokens=tokens, memory=case.footprint(setting))


def share_of(batch: int, ranks: int) -> int:
    """Samples of the rank with the most of them."""
    return math.ceil(batch / ranks)


def run_config(config: TrainConfig, estimate: Estimate, context: int, tokens: int = 0) -> TrainConfig:
    """A configuration with the setting of an estimate.

    Args:
        config: Gives what a plan says nothing of: data, optimizer, logs.
        estimate: The setting.
        context: Tokens of a sample.
        tokens: Of the whole training, which give the number of steps; 0: as many steps as `config` says.
    """
    setting = estimate.setting
    strategy = replace(setting.strategy, gradients="sum", units=config.strategy.units)
    return replace(
        config,
        model=replace(config.model, context=context),
        strategy=strategy,
        batch=setting.samples * setting.micro_batches * estimate.devices,
        micro_batch=setting.samples,
        steps=math.ceil(tokens / estimate.tokens) if tokens else config.steps,
    )


def write(path: str, config: TrainConfig) -> None:
    """Writes a configuration.

    Raises:
        UserError: It cannot be written there, or the file is no YAML's.
    """
    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"--write {path}: expected a file that ends in .yaml, as paceline train reads them")
    try:
        Path(path).write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--write {path}: cannot be written: {error.strerror}; choose another file") from None
