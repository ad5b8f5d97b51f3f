"""The way from one device to a hundred thousand: how much of the speed is left, and where communication takes over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.command_line.quantities import digits
from paceline.core.errors import UserError
from paceline.plan.case import Case
from paceline.plan.estimate import Estimate
from paceline.plan.quantities import short
from paceline.plan.search import search

DEVICES = (*(2**power for power in range(17)), 100_000)
"""Numbers of devices that are looked at."""


@dataclass(frozen=True)
class Point:
    """One number of devices.

    Attributes:
        devices: The number.
        weak: The best with as many samples on each device as were asked for; None if nothing fits.
        strong: The best with the batch that was asked for; None if nothing fits, or devices cannot share it equally.
    """

    devices: int
    weak: Estimate | None
    strong: Estimate | None


def curve(case: Case, samples: int, precision: str, devices: Sequence[int] = DEVICES) -> Iterator[Point]:
    """The best at each number of devices.

    Args:
        case: Model and machines; its number of devices and `samples` make the batch.
        samples: Of a step on one device.
        precision: What is computed in.
        devices: Numbers of devices.
    """
    batch = samples * case.devices
    for count in devices:
        there = replace(case, devices=count)
        strong = search(there, batch // count, precisions=(precision,)) if batch % count == 0 else None
        weak = search(there, samples, precisions=(precision,))
        yield Point(count, weak.recommended, strong.recommended if strong else None)


def takes_over(points: Sequence[Point], strong: bool) -> int | None:
    """The first number of devices at which communication takes longer than what is computed; None: nowhere.

    Communication takes what computing waits for it, and what computing is slower beside it.
    """
    for point in points:
        estimate = point.strong if strong else point.weak
        if estimate is not None and estimate.network > estimate.compute - estimate.slowed:
            return point.devices
    return None


HEADS = ("devices", "strategy", "step", "MFU", "comm.", "tokens/s", "|", "strategy", "step", "MFU", "comm.")


def cells(point: Point) -> tuple[str, ...]:
    """A point as a row of a table: with as many samples on each device, then with the same batch."""
    return (f"{point.devices:,}", *_cells(point.weak, True), "|", *_cells(point.strong, False))


def _cells(each: Estimate | None, rate: bool) -> tuple[str, ...]:
    if each is None:
        return ("-", "", "", "", *([""] if rate else []))
    share = (f"{100 * each.mfu:.1f}%", f"{100 * each.network / each.seconds:.1f}%")
    told = (each.name.replace("groups of", "by"), f"{digits(each.seconds)} s", *share)
    return (*told, short(each.tokens_per_second)) if rate else told


def in_words(points: Sequence[Point]) -> str:
    """Where communication takes over."""
    told = []
    for strong, what in ((False, "as many samples on each device"), (True, "the same batch")):
        first = takes_over(points, strong)
        last = max((p.devices for p in points if (p.strong if strong else p.weak)), default=0)
        told.append(
            f"with {what}, communication takes over (it costs more than computing does) at {first:,} devices"
            if first
            else f"with {what} communication takes over nowhere up to {last:,} devices"
        )
    return "; ".join(told)


def to_dict(points: Sequence[Point]) -> dict[str, Any]:
    """JSON-ready values."""

    def numbers(each: Estimate | None) -> dict[str, Any] | None:
        if each is None:
            return None
        return {
            "strategy": each.name,
            "seconds": each.seconds,
            "compute": each.compute,
            "slowed": each.slowed,
            "communication": each.communication,
            "mfu": each.mfu,
            "tokens_per_second": each.tokens_per_second,
        }

    return {
        "points": [{"devices": p.devices, "weak": numbers(p.weak), "strong": numbers(p.strong)} for p in points],
        "communication_takes_over": {"weak": takes_over(points, False), "strong": takes_over(points, True)},
    }


def draw(points: Sequence[Point], title: str, out: Path) -> None:
    """Draws MFU and the share of communication over the number of devices.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise UserError("--picture needs matplotlib: pip install 'paceline[plot]'") from error
    figure = matplotlib.figure.Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for strong, words, colour in (
        (False, "as many samples on each device", "#3b6ea8"),
        (True, "the same batch", "#d0573f"),
    ):
        found = [(p.devices, e) for p in points if (e := p.strong if strong else p.weak) is not None]
        counts = [count for count, _ in found]
        axes.plot(counts, [100 * e.mfu for _, e in found], "o-", color=colour, label=f"MFU, {words}", markersize=4)
        shares = [100 * e.network / e.seconds for _, e in found]
        axes.plot(counts, shares, "--", color=colour, label=f"communication, {words}", linewidth=1)
        first = takes_over(points, strong)
        if first is not None:
            axes.axvline(first, color=colour, linewidth=0.8, alpha=0.5)
            axes.text(first, 97, f" communication takes over: {first:,}", color=colour, fontsize=8, va="top")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel("devices")
    axes.set_ylabel("% of the peak, or of a step")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {out}: cannot be written: {error}; name a .png, .svg or .pdf file") from None
