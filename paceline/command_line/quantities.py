"""Quantities as a page says them: three digits and a unit. Pure."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))

_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def seconds(value: float) -> str:
    """0.0031 -> "3.10 ms", 7384 -> "2:03:04"."""
    if value >= 60:
        minutes, second = divmod(round(value), 60)
        hours, minute = divmod(minutes, 60)
        return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d} min"
    unit, name = next(((unit, name) for unit, name in _TIMES if value >= unit), _TIMES[-1])
    return f"{digits(value / unit)} {name}"


def size(value: float) -> str:
    """Bytes: 3_200_000 -> "3.05 MiB"."""
    unit, name = next(((unit, name) for unit, name in _SIZES if value >= unit), _SIZES[-1])
    return f"{digits(value / unit)} {name}"


def rate(value: float | None) -> str:
    """Bytes per second, as networks count: 3.2e9 -> "3.20 GB/s"."""
    if value is None:
        return "–"
    unit, name = next(((unit, name) for unit, name in _RATES if value >= unit), _RATES[-1])
    return f"{digits(value / unit)} {name}"


def share(value: float) -> str:
    """0.0312 -> "3.1 %"."""
    return f"{100 * value:.1f} %" if value < 0.9995 else f"{100 * value:.0f} %"


def count(value: float, word: str = "", plural: str = "s") -> str:
    """1200, "step" -> "1,200 steps"."""
    return f"{value:,.0f}" + (f" {word}{'' if value == 1 else plural}" if word else "")


def digits(value: float) -> str:
    """At least three digits that mean something: 0.123, 1.23, 12.3, 1,234."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else "–"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}" if places <= 6 else f"{value:.2e}"
