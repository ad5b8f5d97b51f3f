"""`paceline check`: whether a run's schedule is right on so many devices, proved without running anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.command_line import json_file
from paceline.command_line.json_file import JsonFile
from paceline.command_line.parse import parse_known
from paceline.core.errors import UserError
from paceline.plan.text import count


@dataclass(frozen=True)
class CheckArguments:
    """Proves a run's schedule for all ranks without a process: no deadlock, no race, no gradient lost.

    A configuration file and all settings of `paceline train` say what is run.
    """

    devices: int
    """Number of devices, one rank on each."""
    json: JsonFile = ""
    """Where to write what was looked at as JSON; - prints it and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Prints what a check found; returns the exit status: 1 for a schedule that is wrong.

    Raises:
        UserError: The configuration is not one, or does not suit the number of devices.
    """
    usage = "[FILE.yaml] --devices N [settings of paceline train]"
    options, settings = parse_known(CheckArguments, arguments, "paceline check", usage=usage)
    if options.devices < 1:
        raise UserError(f"--devices: expected 1 or more, got {options.devices}")
    from paceline.train.command_line import parse_train_arguments
    from paceline.train.config import check_ranks

    config = parse_train_arguments(settings)
    check_ranks(config, options.devices)
    from paceline.models.on_meta import on_meta
    from paceline.models.transformer import Transformer
    from paceline.plan.check import examine

    model = on_meta(lambda: Transformer(config.model.shape(config.data.vocabulary)))
    # The rank with most samples makes most micro-batches, and the others take part in each.
    micro_batches = math.ceil(math.ceil(config.batch / options.devices) / config.micro_batch)
    report = examine(model, config.strategy, options.devices, micro_batches)
    json_file.write(options.json, report.to_dict())
    if options.json == json_file.SCREEN:
        return int(bool(report.faults))
    parameters, strategy = sum(parameter.numel() for parameter in model.parameters()), config.strategy
    print(
        f"{config.model.preset}: {parameters:,} parameters, zero {strategy.stage}, {count(report.ranks, 'rank')}, "
        f"{count(micro_batches, 'micro-batch', 'es')} a step"
    )
    if report.faults:
        print("wrong, which is a mistake in paceline:", *report.faults, sep="\n")
        return 1
    print(
        f"right: {count(report.ops, 'op')} of each rank, {report.collectives:,} of them collectives; "
        f"{count(report.pairs, 'pair')} on the same memory in order\n"
        f"right with all that data may ask for besides, such as evaluation: {count(report.unplanned, 'op')} more\n"
        f"a rank sends {report.sent / 2**20:,.2f} MiB a step and holds {report.memory.total / 2**20:,.2f} MiB"
    )
    return 0
