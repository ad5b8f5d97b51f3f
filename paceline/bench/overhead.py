"""`paceline bench overhead`: what hooks, Python and small collectives add to a step, for each unit."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.bench.ranks import run_ranks
from paceline.command_line.json_file import JsonFile
from paceline.core.strategy import Strategy
from paceline.measuring.results import write_json

STRATEGIES: dict[str, Strategy] = {
    **{f"zero {stage}": Strategy(zero=stage) for stage in (0, 1, 2, 3)},
    "zero 1, shared parameters": Strategy(zero=1, share_parameters=True),
}


@dataclass(frozen=True)
class OverheadBench:
    """Time that each strategy adds to a step of units with next to nothing to compute, against a plain loop."""

    units: int = 64
    """Number of units, each a linear layer of 8 by 8."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of ranks, on this machine. With one, all of it is hooks and Python; with more, collectives are in it."""
    rounds: int = 15
    """Rounds; in each, every strategy runs in turn."""
    json: JsonFile = ""
    """Where to write machine, versions, command and figures; - prints them, and all else goes to stderr."""


class Units(nn.Module):
    """Blocks that hardly compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Runs them one after another."""
        for block in self.blocks:
            x = block(x)
        return x


def main(options: OverheadBench) -> dict[str, float]:
    """Measures, prints and writes the figures: microseconds a unit and step, by strategy and number of ranks."""
    figures: dict[str, float] = {}
    for ranks in options.ranks:
        found = run_ranks(ranks, _measure, options.units, options.rounds)[0]
        for name, seconds in found.items():
            figures[f"{name}, {ranks} rank{'s' * (ranks > 1)}"] = 1e6 * seconds
    for name, value in figures.items():
        print(f"{name:<28} {value:8.1f} us a unit")
    if options.json:
        write_json(options.json, [], {"figures": figures})
    return figures


def _measure(units: int, rounds: int) -> dict[str, float]:
    """Seconds a unit that each strategy adds to a plain loop's step: medians."""
    pl.init()
    contestants = {"plain": _loop(Units(units))}
    for name, strategy in STRATEGIES.items():
        contestants[name] = _loop(pl.parallelize(Units(units), strategy))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 2):
        for name, (model, optimizer) in contestants.items():
            pl.barrier()
            start = time.perf_counter()
            for _ in range(5):
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if name != "plain":
                # What was updated is sent during the next forward, which is another contestant's.
                pl.engine_of(model).settle()
            if number >= 2:
                seconds[name].append((time.perf_counter() - start) / 5)
    pl.shutdown()
    plain = seconds.pop("plain")
    # Round by round, as both slow down together.
    return {
        name: statistics.median((own - other) / units for own, other in zip(times, plain, strict=True))
        for name, times in seconds.items()
    }


def _loop(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=1e-6)
