"""What a training's metrics tell of its interruptions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.train.interruption import PARTS


class LoggedStep(NamedTuple):
    """A step as it was logged.

    Attributes:
        number: Of the step.
        at: When it was done, in seconds.
        ranks: That did it.
        job: That did it: 0 for the first, 1 for what went on after the first interruption.
    """

    number: int
    at: float
    ranks: int
    job: int


@dataclass
class RecoveryLog:
    """Steps in the order in which they were done, and what was between them.

    Attributes:
        steps: Those that were done again among them.
        rejoins: When jobs with more ranks than the one before were formed, in seconds.
        after_losses: What each part of going on with as many ranks as before, or fewer, took, in seconds.
        after_rejoins: The same with more.
    """

    steps: list[LoggedStep] = field(default_factory=list)
    rejoins: list[float] = field(default_factory=list)
    after_losses: list[dict[str, float]] = field(default_factory=list)
    after_rejoins: list[dict[str, float]] = field(default_factory=list)

    @property
    def new(self) -> list[LoggedStep]:
        """Steps that were not done before."""
        found: list[LoggedStep] = []
        for step in self.steps:
            if not found or step.number > found[-1].number:
                found.append(step)
        return found


def read_log(path: Path, ranks: int) -> RecoveryLog:
    """Reads a run's metrics, which may be written to meanwhile.

    Args:
        path: Of the file; it need not be there yet.
        ranks: Of the first job.
    """
    text = path.read_text() if path.exists() else ""
    # The last line may be half written.
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    found, grows, job = RecoveryLog(), False, 0
    for line in lines:
        if "run/ranks" in line:
            before, ranks = ranks, int(line["run/ranks"])
            grows = ranks > before
            job += 1
            if grows:
                found.rejoins.append(line["time"])
        elif "train/loss" in line:
            found.steps.append(LoggedStep(line["step"], line["time"], ranks, job))
        elif f"interruption/{next(iter(PARTS))}_seconds" in line:
            parts = {part: float(line[f"interruption/{part}_seconds"]) for part in PARTS}
            (found.after_rejoins if grows else found.after_losses).append(parts)
    return found
