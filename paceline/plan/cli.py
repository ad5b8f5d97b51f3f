"""`paceline plan`: what a model costs on so many devices, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.plan.arguments import PlanArguments


def main(arguments: Sequence[str]) -> int:
    """Prints a plan; returns the exit status: 1 where nothing fits.

    Raises:
        UserError: The arguments name no model, or sizes that do not go together.
    """
    if any(argument.partition("=")[0] == "--validate" for argument in arguments):
        from paceline.plan.published.validate_cli import main as validate

        return validate(arguments)
    options = parse(PlanArguments, arguments, "paceline plan")
    _check(options)
    devices = options.devices
    if devices is None:
        raise UserError("paceline plan: --devices is missing: how many there are, one rank on each")
    if options.hardware or options.here:
        from paceline.plan.command import forecast

        return forecast(options, devices)
    if needing := [name for name in _NEED_HARDWARE if getattr(options, name) != getattr(PlanArguments, name)]:
        raise UserError(
            f"--{needing[0].replace('_', '-')}: needs to know what the devices are: add --hardware, such as "
            "--hardware h100, or --here"
        )
    from paceline.plan import exact_table

    exact_table.show(options, devices)
    return 0


_NEED_HARDWARE = (
    "config",
    "batch_tokens",
    "context",
    "tokens",
    "explain",
    "write",
    "what_if",
    "scaling",
    "picture",
    "failures",
)
"""Options of forecasts of time."""


def _check(options: PlanArguments) -> None:
    if options.devices is not None and options.devices < 1:
        raise UserError(f"--devices: expected 1 or more, got {options.devices}")
    if bool(options.model) == bool(options.config):
        given = "got both" if options.model else "got neither"
        raise UserError(f"paceline plan: expected --model or a configuration such as run.yaml, {given}")
    if options.hardware and options.here:
        raise UserError("paceline plan: expected --hardware or --here, got both")
    for name in ("price", "power_price", "failures", "save_seconds", "restart_seconds", "context"):
        _range(options, name, 0.0, "0 or more")
    _range(options, "slow_rank", 1.0, "1 (as fast as the others) or more")
    if not 0 < options.network < math.inf:
        raise UserError(f"--network: expected a factor above 0, such as 0.5, got {options.network}")


def _range(options: PlanArguments, name: str, least: float, expected: str) -> None:
    value = getattr(options, name)
    if not least <= value < math.inf:
        raise UserError(f"--{name.replace('_', '-')}: expected {expected}, got {value}")
