"""`paceline plan`: what a model costs on so many devices, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.command_line.json_file import SCREEN
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.core.strategy import PRECISIONS
from paceline.launch.screen import show
from paceline.launch.stop import ended_at_once
from paceline.plan.arguments import PlanArguments
from paceline.plan.slow_work import told_to


def main(arguments: Sequence[str]) -> int:
    """Prints a plan; returns the exit status: 1 where nothing fits.

    Raises:
        UserError: The arguments name no model, or sizes that do not go together.
    """
    if any(argument.partition("=")[0] == "--validate" for argument in arguments):
        from paceline.plan.published.validate_cli import main as validate

        return validate(arguments)
    options = parse(PlanArguments, arguments, "paceline plan")
    options = replace(options, precision=PRECISIONS.get(options.precision, options.precision))  # type: ignore[arg-type]
    _check(options)
    devices = options.devices
    if devices is None:
        raise UserError("paceline plan: --devices is missing: how many there are, one rank on each")
    for name, other in _GO_WITH.items():
        if _given(options, name) and not _given(options, other):
            raise UserError(f"{_flag(name)}: plays no part without {_flag(other)}; add it")
    if options.hardware is not None or options.here:
        if of_exact := [name for name in _WITHOUT_HARDWARE if _given(options, name)]:
            raise UserError(
                f"{_flag(of_exact[0])}: is of the exact bytes, shown without --hardware and --here; with them groups "
                "and micro-batches are found, for the --batch-tokens of a step"
            )
        # torch goes on with what it found half imported, and fails later in ways of its own.
        with ended_at_once():
            import torch._dynamo.config  # noqa: F401, by which traces of a model begin

            from paceline.plan.command import forecast

        with told_to(partial(show, warning=True)):
            return forecast(options, devices)
    if needing := [name for name in _NEED_HARDWARE if _given(options, name)]:
        given = options.config if needing[0] == "config" else _flag(needing[0])
        raise UserError(
            f"{given}: needs to know what the devices are: add --hardware, such as --hardware h100, or --here"
        )
    with ended_at_once():
        from paceline.plan import exact_table

    exact_table.show(options, devices)
    return 0


_NEED_HARDWARE = (
    "config",
    "collectives",
    "batch_tokens",
    "context",
    "tokens",
    "explain",
    "write",
    "what_if",
    "scaling",
    "picture",
    "failures",
    "all",
    "network",
    "slow_rank",
)
"""Options of forecasts of time."""

_WITHOUT_HARDWARE = ("shard", "micro_batches")

_GO_WITH = {
    "price": "tokens",
    "power_price": "tokens",
    "save_seconds": "failures",
    "restart_seconds": "failures",
}
"""Options that say more of what another asks for."""


_MOST = 1e9
"""Of any price, time or length: more is a slip."""


def _given(options: PlanArguments, name: str) -> bool:
    return bool(getattr(options, name) != getattr(PlanArguments, name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check(options: PlanArguments) -> None:
    if options.devices is not None and options.devices < 1:
        raise UserError(f"--devices: expected 1 or more, got {options.devices}")
    if bool(options.model) == bool(options.config):
        given = "got both" if options.model else "got neither"
        raise UserError(f"paceline plan: expected --model or a configuration such as run.yaml, {given}")
    if options.hardware is not None and options.here:
        raise UserError("paceline plan: expected --hardware or --here, got both")
    for name in ("price", "power_price", "failures", "save_seconds", "restart_seconds", "context"):
        _range(options, name, 0.0, "0 or more")
    for name in ("write", "json", "picture"):
        path = getattr(options, name)
        # Told before minutes of work that would be lost.
        if path not in ("", SCREEN) and not (folder := Path(path).parent).is_dir():
            raise UserError(f"{_flag(name)} {path}: there is no folder {folder}; make it, or choose another file")
    _range(options, "slow_rank", 1.0, "1 (as fast as the others) or more")
    if not 0 < options.network < math.inf:
        raise UserError(f"--network: expected a factor above 0, such as 0.5, got {options.network}")


def _range(options: PlanArguments, name: str, least: float, expected: str) -> None:
    value = getattr(options, name)
    if not least <= value <= _MOST:
        wanted = f"{_MOST:,.0f} or less" if value > _MOST else expected
        raise UserError(f"{_flag(name)}: expected {wanted}, got {value}")
