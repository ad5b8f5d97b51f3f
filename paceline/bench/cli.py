"""`paceline bench`: which benchmark, with which options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import tyro

from paceline.bench import events, model, overhead, strategies, trainer
from paceline.bench.comm import command as comm
from paceline.bench.network import command as network

Benchmarks = (
    Annotated[strategies.StrategiesBench, tyro.conf.subcommand("strategies")]
    | Annotated[model.ModelBench, tyro.conf.subcommand("model")]
    | Annotated[trainer.TrainerBench, tyro.conf.subcommand("trainer")]
    | Annotated[events.EventsBench, tyro.conf.subcommand("events")]
    | Annotated[overhead.OverheadBench, tyro.conf.subcommand("overhead")]
    | Annotated[comm.CommBench, tyro.conf.subcommand("comm")]
    | Annotated[network.NetworkBench, tyro.conf.subcommand("network")]
)


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit status."""
    options = tyro.cli(Benchmarks, args=list(arguments), prog="paceline bench")
    if isinstance(options, strategies.StrategiesBench):
        strategies.main(options)
    elif isinstance(options, model.ModelBench):
        model.main(options)
    elif isinstance(options, trainer.TrainerBench):
        trainer.main(options)
    elif isinstance(options, overhead.OverheadBench):
        overhead.main(options)
    elif isinstance(options, comm.CommBench):
        comm.main(options)
    elif isinstance(options, network.NetworkBench):
        return network.main(options)
    else:
        events.main(options)
    return 0
