"""What `paceline bench plan` compares: measured steps with what the planner says of them, errors, tables. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.errors import UserError
from paceline.core.strategy import Stage, Strategy
from paceline.measuring.cases import Case
from paceline.plan.case import Case as Planned
from paceline.plan.choice import preferred
from paceline.plan.estimate import Setting
from paceline.plan.hardware import Hardware
from paceline.plan.subject import transformer

Precision = Literal["float32", "bfloat16"]
Recompute = Literal["none", "unit", "keep_attention"]


@dataclass(frozen=True)
class PlanRow:
    """One setting.

    Attributes:
        size: Name of the model.
        ranks: How many.
        zero: Stage.
        precision: What is computed in.
        recompute: What is computed again in backward.
        rounds_ms: A step of the slowest rank in each round, in which settings of a model took turns.
        measured_ms: Of them the lower quartile.
        spread_ms: Half of what lies between the quartiles.
        allocated_bytes: What torch's allocator and the memory between ranks held at a rank's fullest moment: the like
            of a GPU's `max_memory_allocated`.
        process_bytes: What the fullest rank's process had of the kernel at most: what it grew by, with what the C
            library keeps, and what a process has as the machine was measured: interpreter, libraries, their buffers.
        predicted_ms: The planner's.
        predicted_bytes: The planner's of what is allocated, and
        predicted_process_bytes: with what it counts for the framework.
    """

    size: str
    ranks: int
    zero: Stage
    precision: Precision
    recompute: Recompute
    rounds_ms: tuple[float, ...]
    measured_ms: float
    spread_ms: float
    allocated_bytes: int
    process_bytes: int
    predicted_ms: float = 0.0
    predicted_bytes: int = 0
    predicted_process_bytes: int = 0

    @property
    def strategy(self) -> Strategy:
        """What ran."""
        return Strategy(zero=self.zero, precision=self.precision, recompute=self.recompute)

    @property
    def time_error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """The same of what is allocated."""
        return self.predicted_bytes / self.allocated_bytes - 1

    @property
    def process_error(self) -> float:
        """The same of the whole process."""
        return self.predicted_process_bytes / self.process_bytes - 1


def predicted(rows: Sequence[PlanRow], hardware: Mapping[int, Hardware], cases: Mapping[str, Case]) -> list[PlanRow]:
    """Measured rows with what the planner says of them.

    Args:
        rows: Settings that ran.
        hardware: The machine as each number of ranks has it.
        cases: The models by name.
    """
    subjects = {row.size: transformer(row.size, cases[row.size].model, kernels="cpu") for row in rows}
    planned = {(row.size, row.ranks): Planned(subjects[row.size], hardware[row.ranks], row.ranks) for row in rows}
    found = []
    for row in rows:
        estimate = planned[row.size, row.ranks].estimate(Setting(row.strategy, cases[row.size].batch, 1))
        whole = estimate.memory.peak
        found.append(
            replace(
                row,
                predicted_ms=estimate.seconds * 1e3,
                predicted_bytes=whole - estimate.memory.framework,
                predicted_process_bytes=whole,
            )
        )
    return found


def read(path: str | Path) -> tuple[list[PlanRow], dict[int, Hardware]]:
    """Rows and hardware by number of ranks of an earlier run's file.

    Raises:
        UserError: The file cannot be read, or is not such a run's.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        rows: list[PlanRow] = msgspec.convert(values["rows"], list[PlanRow])
        hardware = msgspec.convert(values["hardware"], dict[int, Hardware], strict=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        # msgspec's errors are ValueErrors.
        told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path}: expected what `paceline bench plan --json` writes: {told}") from None
    return rows, hardware


def summary(rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Errors over all rows, and how much slower the planner's choice is than the fastest that was run.

    A choice is among the settings of one model, number of ranks and precision.
    """
    times = [abs(row.time_error) for row in rows]
    allocated, processes = [abs(row.memory_error) for row in rows], [abs(row.process_error) for row in rows]
    groups: dict[tuple[str, int, str], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((row.size, row.ranks, row.precision), []).append(row)
    lost = [lost_by_choice(group) for group in groups.values() if len(group) > 1]
    return {
        "rows": len(rows),
        "time_error_mean": statistics.mean(times),
        "time_error_median": statistics.median(times),
        "time_error_most": max(times),
        "memory_error_mean": statistics.mean(allocated),
        "memory_error_most": max(allocated),
        "process_error_mean": statistics.mean(processes),
        "process_error_most": max(processes),
        "choices": len(lost),
        "choice_lost_mean": statistics.mean(lost) if lost else 0.0,
        "choice_lost_most": max(lost, default=0.0),
        "choices_within_3_percent": sum(each <= 0.03 for each in lost),
    }


def lost_by_choice(rows: Sequence[PlanRow]) -> float:
    """How much longer the setting takes that the planner would take than the fastest one: 0.1 is a tenth.

    The median over rounds of the ratio within a round, as what others do on the machine lengthens both then.
    """
    chosen = preferred(rows, lambda row: row.predicted_ms, lambda row: row.strategy)
    fastest = min(rows, key=lambda row: row.measured_ms)
    pairs = zip(chosen.rounds_ms, fastest.rounds_ms, strict=True)
    return max(0.0, statistics.median(mine / best for mine, best in pairs) - 1)


_HEADER = (
    f"{'model':<8}{'ranks':>6}{'zero':>6}  {'precision':<10}{'recompute':<15}{'step ms':>9}{'+-':>7}{'predicted':>11}"
    f"{'error':>8}{'MiB':>9}{'predicted':>11}{'error':>8}{'process MiB':>13}{'predicted':>11}{'error':>8}"
)


def table(rows: Sequence[PlanRow]) -> str:
    """One line a row."""
    lines = [
        f"{row.size:<8}{row.ranks:>6}{row.zero:>6}  {row.precision:<10}{row.recompute:<15}{row.measured_ms:>9.2f}"
        f"{row.spread_ms:>7.2f}{row.predicted_ms:>11.2f}{row.time_error:>8.1%}{row.allocated_bytes / 2**20:>9.2f}"
        f"{row.predicted_bytes / 2**20:>11.2f}{row.memory_error:>8.1%}{row.process_bytes / 2**20:>13.1f}"
        f"{row.predicted_process_bytes / 2**20:>11.1f}{row.process_error:>8.1%}"
        for row in rows
    ]
    return "\n".join([_HEADER, *lines])


def told(rows: Sequence[PlanRow]) -> list[str]:
    """The summary in sentences."""
    found = summary(rows)
    return [
        "",
        f"step time: mean error {found['time_error_mean']:.1%}, median {found['time_error_median']:.1%}, at most "
        f"{found['time_error_most']:.1%}, of {found['rows']} settings",
        f"peak of what is allocated: mean error {found['memory_error_mean']:.1%}, at most "
        f"{found['memory_error_most']:.1%}; of the process {found['process_error_mean']:.1%}, at most "
        f"{found['process_error_most']:.1%}",
        f"the planner's choice was within 3 % of the fastest in {found['choices_within_3_percent']} of "
        f"{found['choices']}, and slower by {found['choice_lost_mean']:.1%} on average, "
        f"{found['choice_lost_most']:.1%} at most",
    ]
