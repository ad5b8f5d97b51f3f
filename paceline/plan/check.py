"""Whether a strategy's schedule is right for a model, proved for all ranks without a process."""

from __future__ import annotations

import torch
from torch import nn

from paceline.comm.devices import strategy_on
from paceline.core.buffers import statistics_numel
from paceline.core.build_layout import build_layout
from paceline.core.check import Report, all_ranks
from paceline.core.check import check as check_schedules
from paceline.core.errors import UserError
from paceline.core.layout import ROOT
from paceline.core.strategy import Strategy
from paceline.models.require import require_model_and_strategy
from paceline.models.units import find_units, parameter_specs


def check(model: nn.Module, strategy: Strategy | None = None, *, devices: int, micro_batches: int = 1) -> Report:
    """Proves that a model's steps run on so many devices as the strategy says: without a process.

    It takes milliseconds for some devices and seconds for a thousand, as each rank's schedule is looked at.

    No deadlock, no op that reads what is not there or overwrites what another still uses, and the gradient of every
    rank and micro-batch in every update once; see `paceline.core.check.check`. The units are taken to run in the order
    in which they are registered.

    Args:
        model: On any device, also the meta device.
        strategy: How ranks share it; by default `Strategy()`.
        devices: Number of ranks.
        micro_batches: Micro-batches of a step.

    Returns:
        A report of what was looked at, with ops, collectives, pairs of ops, bytes sent and held.

    Raises:
        UserError: The strategy does not suit the model or the number of devices, or one of them is something else.
        ScheduleError: A schedule is wrong, which is a mistake in paceline.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
        >>> report = pl.check(model, pl.Strategy(zero=3), devices=64)
        >>> report.ranks, report.faults
        (64, ())
    """
    require_model_and_strategy("check", model, strategy)
    return examine(model, strategy or Strategy(), devices, micro_batches).require()


def examine(model: nn.Module, strategy: Strategy, devices: int, micro_batches: int) -> Report:
    """`check` with its faults in the report.

    Raises:
        UserError: The strategy does not suit the model or the number of devices.
    """
    for name, value in (("devices", devices), ("micro_batches", micro_batches)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}: expected a whole number, 1 or more, got {value!r:.80}")
    # A precision that is left to the device is this machine's.
    strategy = strategy_on(strategy, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    strategy.shards(devices)
    units = tuple(find_units(model, strategy.units))
    specs = parameter_specs(model, units)
    layout = build_layout(specs, (ROOT, *units), strategy, devices)
    ranks = all_ranks(layout, strategy, devices, units, statistics=statistics_numel(len(specs)))
    return check_schedules(ranks, micro_batches)
