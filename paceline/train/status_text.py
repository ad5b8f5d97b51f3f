"""The status line's text while a model is trained, validated and saved."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import NamedTuple

from paceline.train.metrics import duration

WINDOW_SECONDS = 10.0
"""Rates are means over so long, or over the last two steps where these took longer."""
SETTLED_SECONDS = 2.0
"""Before so long, and two steps after the first, which warms up, an estimate of the time left would mislead."""
WIDEST_BAR = 40


class _Point(NamedTuple):
    """Sums since the first step, at the end of one."""

    time: float
    step: int
    tokens: float
    nats: float


class TrainingProgress:
    """Steps, loss and rates of a training; read by another thread than the one that trains."""

    def __init__(self, steps: int) -> None:
        """Before the first step of `steps`."""
        self._steps, self._exposed = steps, math.nan
        self._points: deque[_Point] = deque()
        self._settled = math.inf

    def step(self, step: int, tokens: float, nats: float) -> None:
        """A step has ended.

        Args:
            step: Its number, from 1.
            tokens: Its target tokens over all ranks.
            nats: Its summed loss; not finite where the step was left out.
        """
        now = time.perf_counter()
        if not self._points:
            self._points.append(_Point(now, step, 0.0, 0.0))
            self._settled = min(self._settled, now + SETTLED_SECONDS)
            return
        last = self._points[-1]
        good = math.isfinite(nats)
        self._points.append(_Point(now, step, last.tokens + tokens * good, last.nats + (nats if good else 0.0)))
        while len(self._points) > 3 and self._points[1].time < now - WINDOW_SECONDS:
            self._points.popleft()

    def exposed(self, fraction: float) -> None:
        """The share of time in which ranks stood still for communication, as last measured."""
        self._exposed = fraction

    def pause(self) -> None:
        """Time from here to the next step's end belongs to no step."""
        self._points.clear()

    def text(self, columns: int) -> str:
        """The line: steps with a bar, loss, rates and the time left, as far as they are known."""
        try:
            first, last = self._points[0], self._points[-1]
        except IndexError:
            return "" if self._settled < math.inf else with_bar(f"step 0/{self._steps}", 0.0, ["the first"], columns)
        width = len(str(self._steps))
        parts = []
        if last.tokens > first.tokens:
            seconds = last.time - first.time
            tokens = last.tokens - first.tokens
            parts += [f"loss {(last.nats - first.nats) / tokens:.4f}", f"{tokens / seconds:,.0f} tokens/s"]
            if math.isfinite(self._exposed):
                parts += [f"comm exposed {100 * self._exposed:.1f} %"]
            if last.step - first.step >= 2 and last.time > self._settled:
                left = (self._steps - last.step) * seconds / (last.step - first.step)
                parts += [f"ETA {duration(max(0.0, left - (time.perf_counter() - last.time)))}"]
        return with_bar(f"step {last.step:>{width}}/{self._steps}", last.step / self._steps, parts, columns)


class ValidationProgress:
    """How far a validation has come."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._done, self._total = 0, 1

    def advance(self, done: int, total: int) -> None:
        """So many micro-batches of this rank are done."""
        self._done, self._total = done, total

    def text(self, columns: int) -> str:
        """The line."""
        seconds = time.perf_counter() - self._began
        left = seconds * (self._total - self._done) / max(1, self._done)
        parts = [f"{100 * self._done / self._total:.0f} %"]
        if self._done and seconds > SETTLED_SECONDS:
            parts.append(f"ETA {duration(left)}")
        return with_bar("validating", self._done / self._total, parts, columns)


def with_bar(label: str, share: float, parts: list[str], columns: int) -> str:
    """`label`, a bar as long as there is room for, and `parts`."""
    rest = "".join(f"  {part}" for part in parts)
    room = min(WIDEST_BAR, columns - len(label) - len(rest) - 2)
    full, empty = ("█", "░") if _can_show("█░") else ("#", "-")
    filled = round(share * room)
    return f"{label}  {full * filled}{empty * (room - filled)}{rest}" if room >= 4 else label + rest


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stderr.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
