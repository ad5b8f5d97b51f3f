"""A run's files as they grow: what it is doing now, in a few words."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.command_line import quantities as said
from paceline.core.errors import UserError
from paceline.report.history import RESUMED, History, Row
from paceline.report.lines import Damage, read_lines

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig

_SILENCE = 30.0
"""Seconds after which it is said that nothing was written; longer where the run writes seldom."""


@dataclass(frozen=True)
class State:
    """What is known of a run at a moment.

    Attributes:
        items: Each a name and what is said of it; no steps before it has begun.
        share: How much of the run is done, from 0 to 1.
        step: Steps done; -1 before any were told of.
        has_ended: Whether all of its steps are done and its weights are saved.
    """

    items: tuple[tuple[str, str], ...]
    share: float
    step: int
    has_ended: bool

    def line(self) -> str:
        """The items on one line."""
        return "  ".join(f"{name} {value}" for name, value in self.items)


class Watched:
    """A run's folder, which may not be there yet; its files are read on from where they were read to."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet.

        Args:
            path: The run's folder. A link, such as runs/latest, is followed once, when it is there.
        """
        self.path = path
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self._rows: list[Row] = []
        self._read = 0
        self._config: TrainConfig | None = None

    def look(self) -> State:
        """Reads what is new, and says how the run is.

        Raises:
            UserError: The path is that of a file.
        """
        from paceline.train.run_folder import CONFIG, METRICS

        if self._config is None and (self.path / CONFIG).is_file():
            self.path = self.path.resolve()
            self._config = _config(self.path / CONFIG)
        elif self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is no run's folder but a file: name a folder, such as runs/latest")
        for line in read_lines(self.path / METRICS, self._decoder, Damage(), self._read):
            self._read = line.stop
            if (row := Row.of(line.value)) is not None:
                self._rows.append(row)
        history = History(tuple(self._rows))
        if not any(life.rows for life in history.lives):
            what = "its first step" if self._config is not None else "the run to begin"
            return State((("waiting for", f"{what} ({self.path})"),), 0.0, -1, False)
        return self._state(history)

    def _state(self, history: History) -> State:
        from paceline.checkpoint.folder import CHECKPOINTS, complete_steps

        row = next(row for life in reversed(history.lives) for row in reversed(life.rows))
        planned = self._config.steps if self._config is not None else 0
        step, ended = history.steps, self._has_ended(history.steps, planned)

        def figure(name: str) -> float:
            return row.figures.get(name, math.nan)

        items = [("step", f"{step:,}" + (f"/{planned:,}" if planned else ""))]
        for name, key, say in (
            ("loss", "train/loss", said.digits),
            ("tokens/s", "perf/tokens_per_second", said.count),
            ("a step", "perf/step_seconds", said.seconds),
            ("MFU", "perf/mfu", said.share),
            ("comm exposed", "comm/exposed_fraction", said.share),
        ):
            if math.isfinite(value := figure(key)):
                items.append((name, say(value)))
        if (loss := history.last_figure("val/loss")) is not None:
            items.append(("held-out loss", said.digits(loss)))
        age = max(0.0, time.time() - self._rows[-1].time) if math.isfinite(self._rows[-1].time) else 0.0
        every = self._config.log.every * figure("perf/step_seconds") if self._config is not None else math.nan
        silent = age > max(_SILENCE, 3 * every if math.isfinite(every) else 0.0)
        if not ended and not silent and planned and math.isfinite(seconds := figure("perf/step_seconds")):
            items.append(("ETA", said.seconds(max(0.0, (planned - step) * seconds - age))))
        if math.isfinite(cost := figure("comm/slow_rank_seconds") / figure("perf/step_seconds")):
            items.append(("slow", f"rank {figure('comm/slow_rank'):.0f} costs the others {said.share(cost)} of a step"))
        if checkpoints := complete_steps(self.path / CHECKPOINTS):
            items.append(("checkpoint", f"step {checkpoints[-1]:,}"))
        if restarts := sum(RESUMED in row.figures for row in self._rows):
            items.append(("restarts", f"{restarts:,}"))
        if skipped := history.last_figure("train/skipped_steps"):
            items.append(("left out", said.count(skipped, "step")))
        if ended:
            items.append(("has", "ended"))
        elif silent:
            items.append(("silent for", f"{said.seconds(age)}: it has stopped, or is busy with something else"))
        return State(tuple(items), step / planned if planned else 0.0, step, ended)

    def _has_ended(self, step: int, planned: int) -> bool:
        """Weights are saved when the last figures are written."""
        from paceline.train.run_folder import METRICS, WEIGHTS

        try:
            saved = (self.path / WEIGHTS).stat().st_mtime_ns >= (self.path / METRICS).stat().st_mtime_ns
        except OSError:
            return False
        return saved and 0 < planned <= step


def _config(path: Path) -> TrainConfig | None:
    """The run's settings; None while they are not whole."""
    from paceline.train.command_line import parse_train_arguments

    try:
        return parse_train_arguments([str(path)]) if path.stat().st_size else None
    except (UserError, OSError):
        return None
