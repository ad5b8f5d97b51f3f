"""A run's figures over its steps, from metrics.jsonl, and where its time went. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

RESUMED = "run/resumed_from"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of metrics.jsonl.

    Attributes:
        step: Steps done.
        time: When it was written, in seconds since 1970; nan if that is missing.
        figures: By `group/name`; what was not finite is nan.
    """

    step: int
    time: float
    figures: Mapping[str, float]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Row | None:
        """A row of the values of a line; None without a step."""
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            return None
        figures = {
            key: _number(value)
            for key, value in values.items()
            if "/" in key and (value is None or isinstance(value, int | float))
        }
        return cls(step, _number(values.get("time")), figures)


@dataclass(frozen=True)
class Life:
    """The rows between a start of the run and its end or its next start.

    Attributes:
        first: The step that it went on from.
        rows: Those with the figures of an interval of steps, the latest first start's included.
        validations: Those of a validation.
        started: When it began, in seconds since 1970, as far as its rows tell.
        ended: When its last row was written.
        interrupted: Seconds since the job before it ended, of ranks that went on by themselves; else 0.
        steps: How many steps each of `rows` is about.
    """

    first: int
    rows: tuple[Row, ...]
    validations: tuple[Row, ...]
    started: float
    ended: float
    interrupted: float

    @property
    def steps(self) -> tuple[int, ...]:
        """How many steps each row is about."""
        before = (self.first, *(row.step for row in self.rows))
        return tuple(max(0, row.step - last) for row, last in zip(self.rows, before, strict=False))

    @property
    def last(self) -> int:
        """The last step that was written about."""
        return self.rows[-1].step if self.rows else self.first

    def sum(self, name: str, after: int = 0, until: float = math.inf) -> float:
        """A figure of each step, added up over the steps of rows in (after, until]."""
        return math.fsum(
            row.figures[name] * count
            for row, count in zip(self.rows, self.steps, strict=True)
            if after < row.step <= until and math.isfinite(row.figures.get(name, math.nan))
        )


@dataclass(frozen=True)
class Goodput:
    """Where a run's wall time went, in seconds.

    Attributes:
        useful: Steps that count.
        repeated: Steps that were lost, and done again.
        validating: Validations.
        interrupted: Between the end of a job and the start of the one that went on for it by itself.
        other: The rest: starting, saving, writing a sample.
    """

    useful: float
    repeated: float
    validating: float
    interrupted: float
    other: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.useful + self.repeated + self.validating + self.interrupted + self.other

    @property
    def share(self) -> float:
        """The useful part of it; 0 of nothing."""
        return self.useful / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class History:
    """All rows of a run, in the order in which they were written."""

    rows: tuple[Row, ...]

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """From each start to the next."""
        starts = [index for index, row in enumerate(self.rows) if index and RESUMED in row.figures]
        return tuple(_life(self.rows[a:b]) for a, b in pairwise([0, *starts, len(self.rows)]) if b > a)

    @cached_property
    def kept(self) -> tuple[Row, ...]:
        """Rows about intervals of steps that count: of what was done again, the last time."""
        return self._that_count(lambda life: life.rows)

    @cached_property
    def validations(self) -> tuple[Row, ...]:
        """Rows about validations after steps that count."""
        return self._that_count(lambda life: life.validations)

    def _that_count(self, rows: Callable[[Life], Sequence[Row]]) -> tuple[Row, ...]:
        untils = [min((later.first for later in self.lives[i + 1 :]), default=math.inf) for i in range(len(self.lives))]
        return tuple(
            row for life, until in zip(self.lives, untils, strict=True) for row in rows(life) if row.step <= until
        )

    @property
    def steps(self) -> int:
        """Steps done."""
        return max((life.last for life in self.lives[-1:]), default=0)

    def mean(self, name: str) -> float | None:
        """A figure, on average over the time of all intervals but those of a first step, which warms up.

        None without a finite one; of a run with first steps alone, over these.
        """
        timed = [
            (row.figures[name], row.figures["perf/step_seconds"] * count)
            for life in self.lives
            for row, count in zip(life.rows, life.steps, strict=True)
            if math.isfinite(row.figures.get(name, math.nan) * row.figures.get("perf/step_seconds", math.nan))
            and (row.step > life.first + 1 or life.last == life.first + 1)
        ]
        seconds = math.fsum(time for _, time in timed)
        return math.fsum(value * time for value, time in timed) / seconds if seconds > 0 else None

    def last_figure(self, name: str) -> float | None:
        """The latest finite value of a figure."""
        for row in reversed(self.rows):
            if math.isfinite(value := row.figures.get(name, math.nan)):
                return value
        return None

    def most(self, name: str) -> float | None:
        """The largest finite value of a figure."""
        values = [row.figures.get(name, math.nan) for row in self.rows]
        return max(filter(math.isfinite, values), default=None)

    @property
    def skipped(self) -> list[int]:
        """Steps until which steps were left out since the row before, as their gradient was not finite."""
        counts = [(row.step, row.figures.get("train/skipped_steps", 0.0)) for row in self.kept]
        return [step for (_, before), (step, now) in zip([(0, 0.0), *counts], counts, strict=False) if now > before]

    @cached_property
    def goodput(self) -> Goodput | None:
        """Where the time went; None where the rows do not tell."""
        useful = repeated = validating = interrupted = wall = 0.0
        for index, life in enumerate(self.lives):
            until = min((later.first for later in self.lives[index + 1 :]), default=math.inf)
            useful += life.sum("perf/step_seconds", until=until)
            repeated += life.sum("perf/step_seconds", after=int(until)) if math.isfinite(until) else 0.0
            validating += math.fsum(
                value for row in life.validations if math.isfinite(value := row.figures.get("val/seconds", math.nan))
            )
            interrupted += life.interrupted
            wall += max(0.0, life.ended - life.started) if math.isfinite(life.ended - life.started) else 0.0
        if not useful > 0 or not any(math.isfinite(row.time) for row in self.rows):
            return None
        # A clock that was set back meanwhile makes the wall time too short.
        other = max(0.0, wall - useful - repeated - validating)
        return Goodput(useful, repeated, validating, interrupted, other)


def _life(rows: Sequence[Row]) -> Life:
    begun = rows[0].figures.get(RESUMED, math.nan)
    interrupted = rows[0].figures.get("run/interrupted_seconds", 0.0)
    intervals = [row for row in rows if {"train/loss", "perf/step_seconds"} & row.figures.keys()]
    # A first start writes no row: it began a step before its first one.
    seconds = rows[0].figures.get("perf/step_seconds", 0.0) * rows[0].step if not math.isfinite(begun) else 0.0
    times = [row.time for row in rows if math.isfinite(row.time)]
    return Life(
        first=int(begun) if math.isfinite(begun) else 0,
        rows=tuple(row for index, row in enumerate(intervals) if not index or row.step > intervals[index - 1].step),
        validations=tuple(row for row in rows if "val/loss" in row.figures),
        started=times[0] - (seconds if math.isfinite(seconds) else 0.0) if times else math.nan,
        ended=times[-1] if times else math.nan,
        interrupted=interrupted if math.isfinite(interrupted) else 0.0,
    )


def _number(value: object) -> float:
    """A finite float, or nan."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
