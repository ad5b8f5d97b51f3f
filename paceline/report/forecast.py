"""What was forecast of a run, beside what it took: the run folder's plan.json, as far as it can be read."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from paceline.command_line import quantities as said


class Pair(msgspec.Struct):
    """One quantity.

    Attributes:
        predicted: By the planner; None where it knows nothing of the machine.
        measured: By the run.
    """

    measured: float
    predicted: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None where that is no number."""
        if self.predicted is None or not self.measured > 0 or not math.isfinite(self.predicted):
            return None
        return self.predicted / self.measured - 1


class Forecast(msgspec.Struct):
    """A forecast beside what was measured, of a run that ended.

    Attributes:
        step_seconds: Of a step.
        peak_bytes: What the rank that wrote the file held at its fullest.
    """

    step_seconds: Pair
    peak_bytes: Pair

    def figures(self) -> list[tuple[str, str, str, float | None]]:
        """Name, title, text and value of each quantity that was predicted."""
        found: list[tuple[str, str, str, float | None]] = []
        for name, title, pair, shown in (
            ("forecast_step_seconds", "Forecast of a step", self.step_seconds, said.seconds),
            ("forecast_peak_bytes", "Forecast of peak memory", self.peak_bytes, said.size),
        ):
            if pair.predicted is not None and pair.error is not None:
                text = f"{shown(pair.predicted)}, measured {shown(pair.measured)} ({100 * pair.error:+.1f} %)"
                found.append((name, title, text, pair.predicted))
        return found


def read_forecast(path: Path, problems: list[str]) -> Forecast | None:
    """Reads a run's plan.json; None where there is none, as a run that has not ended has.

    Args:
        path: The file.
        problems: Gets a sentence where the file cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Forecast)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return None
