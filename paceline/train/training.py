"""What one rank trains with, put together."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.data import Corpus
from paceline.data.loader import Loader
from paceline.launch.seat import Seat
from paceline.launch.stop import StopRequest
from paceline.models.transformer import Transformer
from paceline.train.checkpoints import Checkpoints
from paceline.train.config import TrainConfig
from paceline.train.forecast import Forecast
from paceline.train.interruption import Interruption
from paceline.train.optim import Update
from paceline.train.outputs import Outputs


@dataclass(frozen=True)
class Training:
    """What one rank trains with.

    Attributes:
        config: All settings.
        corpus: The text.
        model: Parallel.
        update: Its optimizer.
        loader: Its batches, from step `first` on.
        first: The step that the training goes on from; 0 for a new one.
        outputs: Where results go.
        stop: Whether a stop was asked for.
        checkpoints: What a run that stops goes on from.
        forecast: What the planner says of it.
        seat: This rank's, where ranks are replaced.
        interruption: After which it goes on, where it does.
    """

    config: TrainConfig
    corpus: Corpus
    model: Transformer
    update: Update
    loader: Loader
    first: int
    outputs: Outputs
    stop: StopRequest
    checkpoints: Checkpoints
    forecast: Forecast
    seat: Seat | None = None
    interruption: Interruption | None = None

    def leaves(self) -> float:
        """1.0 where this rank was asked to leave the job, else 0.0."""
        return float(self.seat is not None and self.seat.asks_to_leave())
