"""A training validated on held-out text, which its status line shows."""

from __future__ import annotations

from paceline.train.status_text import ValidationProgress
from paceline.train.summary import VALIDATING
from paceline.train.training import Training
from paceline.train.validate import Validation, validate


def validate_shown(training: Training, batches: int) -> Validation | None:
    """On so many global batches of held-out text; None if a stop was asked for meanwhile."""
    config, model, outputs = training.config, training.model, training.outputs
    progress = ValidationProgress()

    def advance(done: int, total: int) -> None:
        progress.advance(done, total)
        outputs.tell_now_and_then(progress.text)

    with outputs.showing(VALIDATING, progress.text):
        return validate(
            model,
            training.corpus.validation,
            context=model.config.context,
            micro_batch=config.micro_batch,
            samples=batches * config.batch,
            stopped=lambda: bool(training.stop.received),
            progress=advance,
        )
