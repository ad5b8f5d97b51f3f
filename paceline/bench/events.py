"""`paceline bench events`: what recording an event for every op costs, as a share of a step."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

import paceline as pl
from paceline.bench.ranks import run_ranks
from paceline.comm.streams import HostClock
from paceline.command_line.json_file import JsonFile
from paceline.core.collectives.rounds import Traffic
from paceline.core.ops import Key, Op
from paceline.executor.executor import Executor
from paceline.executor.memory_meter import reader
from paceline.measuring.results import half_spread, write_json
from paceline.models.presets import preset
from paceline.models.transformer import Transformer

_WARM_UP, _LOOK = 3, 50
"""Rounds that do not count, and between two looks at how well the ratio is known."""
_WELL = 0.001
"""An error of the ratio that is small enough to tell whether recording costs 0.5 % of a step."""


@dataclass(frozen=True)
class EventsBench:
    """Cost of recording events, and of all hooks together, relative to the time of a step."""

    preset: str = "tiny"
    """Model preset; the smaller the model, the larger the share."""
    batch: int = 4
    """Sequences a rank."""
    ranks: int = 2
    """Number of ranks."""
    rounds: int = 1000
    """How often two steps with recording and two without run in turn, at most; fewer where the ratio is known well."""
    json: JsonFile = ""
    """Where to write machine, versions, command and figures; - prints them, and all else goes to stderr."""


def main(options: EventsBench) -> dict[str, float]:
    """Measures, prints and writes the figures."""
    figures: dict[str, float] = run_ranks(options.ranks, _measure, options)[0]
    share = figures["ops_per_step"] * figures["seconds_per_op"] / figures["step_seconds"]
    figures["share_of_step"] = share
    print(
        f"{options.preset}, {options.ranks} ranks: {figures['ops_per_step']:.0f} ops a step at "
        f"{figures['seconds_per_op'] * 1e6:.2f} us each, step {figures['step_seconds'] * 1e3:.2f} ms: {share:.3%}; "
        f"in turn, steps with recording take {figures['on_to_off']:.4f} ± {figures['on_to_off_error']:.4f} of others "
        f"({figures['rounds']:.0f} rounds of two and two)"
    )
    if options.json:
        write_json(options.json, [], {"figures": figures})
    return figures


def _measure(options: EventsBench) -> dict[str, float]:
    world = pl.init()
    model = pl.parallelize(Transformer(preset(options.preset)))
    engine = pl.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, model.config.vocabulary, (options.batch, model.config.context))

    def step(on: bool) -> float:
        engine.record_events(on)
        start = time.perf_counter()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        engine.drain_events()
        return seconds

    ratios: list[float] = []
    without: list[float] = []
    for number in range(-_WARM_UP, options.rounds):
        # What drifts over a round takes as long from the one as from the other, whose order changes in turn.
        first = number % 2 == 0
        one, other, another, last = step(first), step(not first), step(not first), step(first)
        on, off = (one + last, other + another) if first else (other + another, one + last)
        if number >= 0:
            ratios.append(on / off)
            without.append(off / 2)
        if number > 0 and number % _LOOK == 0:
            is_known = _error(ratios) <= _WELL
            if all(pl.all_gather_json(is_known, "how well the ratio is known")):
                break
    ops = engine.schedule.step(1)
    pl.release(model)
    pl.shutdown()
    return {
        "ops_per_step": float(len(ops)),
        "seconds_per_op": seconds_per_op(world.rank),
        "step_seconds": statistics.median(without),
        "on_to_off": statistics.median(ratios),
        "on_to_off_error": _error(ratios),
        "rounds": float(len(ratios)),
    }


def _error(values: list[float]) -> float:
    """The standard error of a median: 1.25 standard deviations, told by the quartiles, by the root of their number."""
    return 1.2533 * half_spread(values) / 0.6745 / math.sqrt(len(values))


def seconds_per_op(rank: int, ops: int = 20_000) -> float:
    """Seconds that an executor takes to record one compute op, reading it out included."""
    memory = reader(torch.device("cpu"))
    executor = Executor(rank, HostClock(), {}, lambda op: lambda: Traffic(0, 0), memory=memory)
    key = Key("forward", "unit", 0, "forward")
    executor.load(0, (Op("forward", "unit", 0, "forward", "compute"),))
    start = time.perf_counter()
    for index in range(ops):
        executor.begin(key)
        executor.end()
        if index % 1000 == 999:
            executor.drain()
    return (time.perf_counter() - start) / ops
