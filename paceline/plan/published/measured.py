"""What a row measured: seconds of a step, whichever column tells them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from operator import truediv

from paceline.core.errors import UserError
from paceline.models.flops import flops_per_token
from paceline.plan.published.describe import Described
from paceline.plan.published.table import Row
from paceline.plan.run import Run


def measured_seconds(row: Row, described: Described, peak: float) -> tuple[float, str]:
    """Seconds of a step that a row tells, and by which column.

    Args:
        row: The row.
        described: What it says was run.
        peak: The device's datasheet peak in FLOP/s, by which figures of utilisation are made seconds.

    Raises:
        UserError: No column tells it, or it tells of more than the device can compute.
    """
    run = described.run
    model = flops_per_token(run.config, run.config.context) * run.tokens / run.devices
    again = 4 / 3 if run.recompute == "unit" else 1.0
    ways: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("seconds", lambda value: value),
        *((name, partial(truediv, units)) for name, units in _counted(run).items()),
        ("model_flops", lambda value: model / value),
        # Without a word on what is counted: until 2022 Megatron counted what is computed again, too.
        ("flops", lambda value: model * (again if described.stack == "megatron_2021" else 1.0) / value),
        ("hardware_flops", lambda value: model * again / value),
        ("mfu", lambda value: model / (_share(value) * peak)),
        ("hfu", lambda value: model * again / (_share(value) * peak)),
    )
    for name, seconds in ways:
        value = row.number(name)
        if value is None:
            continue
        called = row.called[name]
        if value <= 0:
            raise UserError(f"{called}: expected a number above 0, got {row.values[name]!r}")
        taken = seconds(value)
        if model / taken > _MOST.get(run.dtype, 1.0) * peak:
            raise UserError(
                f"{called}: {row.values[name]} is {100 * model / taken / peak:,.0f} % of the device's peak, "
                f"{peak / 1e12:g} TFLOP/s: is it in other units, which the column's name can tell, or of another model?"
            )
        return taken, name
    raise UserError("expected a measured step time, throughput, FLOP/s or MFU, got none of them")


_MOST = {"float32": math.inf, "float8": 2.0}
"""So many times the peak may be reached: what is called fp32 may be TF32, and the peak may be of 16 bits."""


def contradicting(row: Row, described: Described, seconds: float) -> list[str]:
    """Columns that tell of another time than the one that counts, in words; those of utilisation count otherwise.

    Args:
        row: The row.
        described: What it says was run.
        seconds: What counts.
    """
    told = list[str]()
    for name, units in _counted(described.run).items():
        value = row.number(name)
        if value and abs(units / value / seconds - 1) > _ROUNDING + _last_digit(row.values[name]) / value:
            told.append(f"{row.called[name]} {row.values[name]} would be steps of {units / value:.4g} s")
    return told


def _counted(run: Run) -> dict[str, float]:
    """What throughputs count, and how much of it there is in a step."""
    return {
        "tokens_per_second_device": run.tokens / run.devices,
        "tokens_per_second": run.tokens,
        "samples_per_second": run.tokens / run.config.context,
    }


_ROUNDING = 0.05
"""By how much two columns of one time may differ."""


def _last_digit(number: str) -> float:
    """What the last digit of a number is worth, which was rounded."""
    decimals = re.search(r"\.(\d+)", number)
    return 10.0 ** -len(decimals[1]) if decimals else 1.0


def measures_time(row: Row) -> bool:
    """Whether any column tells how long a step took."""
    names = ("seconds", "tokens_per_second_device", "tokens_per_second", "samples_per_second", "model_flops")
    return any(name in row.values for name in (*names, "flops", "hardware_flops", "mfu", "hfu"))


def read_as_share(row: Row, column: str) -> str:
    """What is said of a utilisation in a column of percent that is below one and was taken for a share; "" of others.

    Args:
        row: The row.
        column: By which `measured_seconds` told its time.
    """
    called, value = row.called[column], row.number(column) or 0.0
    is_share = column in ("mfu", "hfu") and value <= 0.01 and re.search("pct|percent|%", called.lower())
    return f"{called} {row.values[column]} as a share, not percent" if is_share else ""


def _share(value: float) -> float:
    """A utilisation: 45 (percent, of which hundredths were made) or 0.45."""
    return value * 100 if value <= 0.01 else value
