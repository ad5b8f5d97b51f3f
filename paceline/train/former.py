"""What is left in a process of the job that it was in before, until the next one begins."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import paceline as pl
from paceline.checkpoint.survivors import is_writable
from paceline.core.parameter_server import ParameterServer
from paceline.data import Corpus
from paceline.launch.seat import Place
from paceline.launch.stop import StopRequest
from paceline.train.interruption import Interruption
from paceline.train.kept import Kept, kept_of
from paceline.train.training import Training

_WORTH_COLLECTING = 64 << 20
"""Bytes of a model from which on memory that only the garbage collector frees is worth its milliseconds."""


@dataclass
class Former:
    """What is left in this process of the job that it was in before.

    Attributes:
        stop: Remembers a stop that is asked for, also between two jobs.
        run: The run's folder, once it is known.
        corpus: The run's text, once it was opened.
        training: What this rank trained with, where it came so far.
        kept: The same, out of its job, where this rank holds all of it; then there is no `training`.
        before: Bytes that this rank held before it had a model.
        place: Its place in that job.
        saved: When the latest checkpoint began, or the run, in seconds on the host's monotonic clock.
        left: When it left, in seconds on the host's monotonic clock.
        interruption: What going on takes, or took the last time.
        is_settled: Whether what was imported is kept out of the garbage collector's sight.
    """

    stop: StopRequest
    run: Path | None = None
    corpus: Corpus | None = None
    training: Training | None = None
    kept: Kept | None = None
    before: int | None = None
    place: Place | None = None
    saved: float | None = None
    left: float | None = None
    interruption: Interruption | None = None
    is_settled: bool = False

    def settle_imports(self) -> None:
        """What was imported is not looked at any more when memory is collected: that takes milliseconds then."""
        if not self.is_settled:
            self.is_settled = True
            gc.freeze()

    def did(self, part: str) -> None:
        """Counts what has passed as this part of an interruption, if there is one."""
        if self.interruption is not None and not self.interruption.is_over:
            self.interruption.did(part)

    @property
    def done(self) -> int | None:
        """After how many steps it is what this rank can hand on; None if it can hand on nothing."""
        if self.kept is not None:
            return self.kept.update.done
        if self.training is None or not is_writable(pl.engine_of(self.training.model)):
            return None
        return self.training.update.done

    def holds(self) -> str:
        """The same for ranks that hold the same elements after the same step."""
        if self.kept is not None:
            return f"all after step {self.kept.update.done}"
        if self.training is None:
            return ""
        schedule = pl.engine_of(self.training.model).schedule
        shard = schedule.rank if isinstance(schedule, ParameterServer) else schedule.shard_index
        return f"shard {shard} after step {self.training.update.done}"

    def leave(self) -> None:
        """The job is over: keeps what there is without it."""
        if self.training is not None:
            self.saved = self.training.checkpoints.since
        if self.training is not None and (kept := kept_of(self.training)) is not None:
            self.training, self.kept = None, kept
            _collect(sum(p.nbytes for p in kept.model.parameters()))
        elif self.kept is not None:
            self.kept.leave()

    def free(self) -> None:
        """Frees what this rank trained with, before as much is made again."""
        held = self.training or self.kept
        self.training, self.kept = None, None
        if held is not None:
            size = sum(p.nbytes for p in held.model.parameters())
            del held
            _collect(size)

    def begins(self, training: Training, run: Path) -> None:
        """The next job is about to do steps."""
        self.training, self.kept = training, None
        self.run, self.corpus, self.before = run, training.corpus, training.forecast.before


def _collect(size: int) -> None:
    """Frees what a model of so many bytes has left."""
    if size > _WORTH_COLLECTING:
        gc.collect()
