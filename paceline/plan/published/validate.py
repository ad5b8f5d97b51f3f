"""Predicts every row of a table, and says of each that it cannot predict why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UserError
from paceline.models.flops import flops_per_token
from paceline.plan.footprint import FREE
from paceline.plan.published.describe import measured_in_tests
from paceline.plan.published.errors import Errors, constant_utilisation, errors, in_order
from paceline.plan.published.measured import measures_time
from paceline.plan.published.memory import MemoryPrediction, measures_memory, predict_memory
from paceline.plan.published.predict import Prediction, machines, predict
from paceline.plan.published.table import Row, Table


@dataclass(frozen=True)
class Checked:
    """A table with forecasts beside it.

    Attributes:
        table: What was read.
        times: Rows whose step was predicted.
        memories: Rows whose memory was.
        refused: Rows of which something was not predicted, and the reason.
    """

    table: Table
    times: tuple[tuple[Row, Prediction], ...]
    memories: tuple[tuple[Row, MemoryPrediction], ...]
    refused: tuple[tuple[Row, str], ...]

    @property
    def steady(self) -> Errors | None:
        """Errors of memory between steps."""
        return errors([each.steady_error for _, each in self.memories if each.steady_error is not None])

    @property
    def peak(self) -> Errors | None:
        """Errors of the peak of memory."""
        return errors([each.peak_error for _, each in self.memories if each.peak_error is not None])

    @property
    def wrongly_fits(self) -> list[Row]:
        """Rows of runs that ran out of memory, of which the forecast says that they fit."""
        return [
            row
            for row, each in self.memories
            if each.ran_out and each.available is not None and each.peak_predicted <= (1 - FREE) * each.available
        ]


def check(table: Table) -> Checked:
    """Predicts every row."""
    times, memories, refused = [], [], []
    for row in table.rows:
        wanted = 0
        if measures_time(row):
            wanted += 1
            try:
                if reason := measured_in_tests(row):
                    raise UserError(reason)
                times.append((row, predict(row)))
            except UserError as error:
                refused.append((row, f"step time: {error}"))
        if measures_memory(row):
            wanted += 1
            try:
                memories.append((row, predict_memory(row)))
            except UserError as error:
                refused.append((row, f"memory: {error}"))
        if not wanted:
            refused.append((row, row.fault or "tells neither how long a step took nor how much memory it needed"))
    return Checked(table, tuple(times), tuple(memories), tuple(refused))


def ideal_seconds(prediction: Prediction) -> float:
    """Seconds of a step in which devices did nothing but the model's operations, at their datasheets' peak."""
    run = prediction.described.run
    peak = machines(prediction.described).device.peak
    flops = flops_per_token(run.config, run.config.context) * run.tokens / run.devices
    return flops / (peak.get(run.dtype) or next(iter(peak.values())))


def baseline(rows: Iterable[tuple[Row, Prediction]]) -> Errors | None:
    """What one utilisation for each device and precision would give."""
    predictions = [each for _, each in rows]
    return errors(
        constant_utilisation(
            [each.measured for each in predictions],
            [ideal_seconds(each) for each in predictions],
            [(each.described.gpu, each.described.run.dtype) for each in predictions],
        )
    )


def order(rows: Iterable[tuple[Row, Prediction]]) -> tuple[int, int]:
    """Pairs of rows of one table that the forecast has in the measured order of throughput, and all that have one."""
    by_table: dict[str, list[Prediction]] = {}
    for row, each in rows:
        by_table.setdefault(f"{row.text('source')} {row.text('table')}", []).append(each)
    right = pairs = 0
    for members in by_table.values():
        tokens = [each.described.run.tokens / each.described.run.devices for each in members]
        found = in_order(
            [amount / each.measured for amount, each in zip(tokens, members, strict=True)],
            [amount / each.step.total for amount, each in zip(tokens, members, strict=True)],
        )
        right, pairs = right + found[0], pairs + found[1]
    return right, pairs


def to_dict(checked: Checked) -> dict[str, Any]:
    """JSON-ready values: each row, then figures of all."""
    right, pairs = order(checked.times)
    found, simple = errors([each.error for _, each in checked.times]), baseline(checked.times)
    return {
        "file": str(checked.table.path),
        "unknown_columns": list(checked.table.unknown),
        "rows": [_time(row, each) for row, each in checked.times],
        "memory_rows": [_memory(row, each) for row, each in checked.memories],
        "not_predicted": [{"line": row.line, "reason": reason} for row, reason in checked.refused],
        "step_time": found and found.to_dict(),
        "constant_mfu": simple and simple.to_dict(),
        "pairs_in_order": {"right": right, "pairs": pairs},
        "steady_memory": checked.steady and checked.steady.to_dict(),
        "peak_memory": checked.peak and checked.peak.to_dict(),
        "wrongly_fits": [row.line for row in checked.wrongly_fits],
    }


def _time(row: Row, each: Prediction) -> dict[str, Any]:
    step, run = each.step, each.described.run
    return {
        "line": row.line,
        "model": row.values.get("model", ""),
        "gpu": each.described.gpu,
        "devices": run.devices,
        "measured_seconds": each.measured,
        "measured_by": each.column,
        "predicted_seconds": step.total,
        "error": each.error,
        "parts": {name: getattr(step, name) for name in step.__dataclass_fields__},
        "by_formula": each.described.by_formula,
        "assumed": list(each.described.assumed),
    }


def _memory(row: Row, each: MemoryPrediction) -> dict[str, Any]:
    return {
        "line": row.line,
        "steady_measured": each.steady,
        "steady_predicted": each.steady_predicted,
        "steady_error": each.steady_error,
        "peak_measured": each.peak,
        "peak_predicted": each.peak_predicted,
        "peak_error": each.peak_error,
        "ran_out": each.ran_out,
        "available": each.available,
    }
