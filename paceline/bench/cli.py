"""`paceline bench`: which benchmark, with which options."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.bench import checkpoint, events, faults, gpu, model, overhead, plan, strategies, trainer
from paceline.bench.comm import command as comm
from paceline.bench.network import command as network
from paceline.command_line.help_page import fill
from paceline.command_line.json_file import SCREEN
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.launch.temporary_folder import TemporaryFolder

BENCHMARKS: dict[str, tuple[type[Any], Callable[[Any], object]]] = {
    "strategies": (strategies.StrategiesBench, strategies.main),
    "gpu": (gpu.GpuBench, gpu.main),
    "model": (model.ModelBench, model.main),
    "trainer": (trainer.TrainerBench, trainer.main),
    "events": (events.EventsBench, events.main),
    "overhead": (overhead.OverheadBench, overhead.main),
    "comm": (comm.CommBench, comm.main),
    "network": (network.NetworkBench, network.main),
    "plan": (plan.PlanBench, plan.main),
    "checkpoint": (checkpoint.CheckpointBench, checkpoint.main),
    "faults": (faults.FaultsBench, faults.main),
}
"""Options and main function of each."""


def main(arguments: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit status.

    Raises:
        UserError: There is no such benchmark, or an option makes no sense.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0
    options, run = parse_bench_arguments(arguments)
    if options.json != SCREEN:
        status = run(options)
    else:
        # Tables go elsewhere, so that what reads the JSON gets nothing else.
        with TemporaryFolder("bench") as folder:
            file = folder.path / "results.json"
            with contextlib.redirect_stdout(sys.stderr):
                status = run(replace(options, json=str(file)))
            if file.exists():
                sys.stdout.write(file.read_text())
    return status if isinstance(status, int) else 0


def parse_bench_arguments(arguments: Sequence[str]) -> tuple[Any, Callable[[Any], object]]:
    """The options that arguments describe, and the function that they are for.

    Raises:
        UserError: There is no such benchmark, or a flag is unknown or ill-typed.
        SystemExit: --help.
    """
    name = arguments[0]
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(BENCHMARKS)}"
        raise UserError(f"there is no benchmark {name!r}; {hint}")
    cls, run = BENCHMARKS[name]
    return parse(cls, arguments[1:], f"paceline bench {name}"), run


def _help() -> str:
    lines = [
        fill(f"  {name:<11} {(cls.__doc__ or '').partition(chr(10))[0]}", " " * 14)
        for name, (cls, _) in BENCHMARKS.items()
    ]
    usage, more = "usage: paceline bench BENCHMARK [options]", "paceline bench BENCHMARK --help shows the options"
    return "\n".join([usage, "", *lines, "", more, ""])
