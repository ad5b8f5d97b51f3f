"""Updates that all ranks left out: said, and written down with the samples of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import UserError
from paceline.train.config import TrainConfig
from paceline.train.not_finite import describe_losses
from paceline.train.outputs import Outputs
from paceline.train.run_folder import SKIPPED

MOST_IN_A_ROW = 10


Samples = list[list[list[int]]]
"""Numbers of samples by rank and micro-batch."""


class Diverged(UserError):
    """Too many updates in a row were left out.

    Attributes:
        first: The first of their steps, from 1.
        last: The last of them.
    """

    def __init__(self, message: str, first: int, last: int) -> None:
        """Names the steps."""
        super().__init__(message)
        self.first, self.last = first, last


def tell_skipped(
    outputs: Outputs,
    config: TrainConfig,
    step: int,
    skipped: int,
    loss: float,
    norm: float,
    losses: Sequence[float],
    scale: float,
    samples: Samples,
) -> None:
    """Says on rank 0 that a step's update was left out, and writes down which samples it had.

    Args:
        outputs: Where to.
        config: The run's.
        step: Its number, from 1.
        skipped: How many were left out so far.
        loss: Its mean over tokens.
        norm: The gradient's.
        losses: The sums of all ranks' `not_finite.marks`.
        scale: The loss scale from now on.
        samples: The step's, by rank and micro-batch.
    """
    if math.isfinite(norm):
        why = (
            f"the loss ({loss:.4g}) or the gradient's norm ({norm:.4g}) is more than {config.optim.skip_spikes:g} "
            "standard deviations above the steps before"
        )
    else:
        of_ranks = describe_losses(*losses) or "the losses of all ranks were finite"
        why = f"the gradient is not finite (its norm is {norm}; {of_ranks})"
    told = f"; the loss scale is now {scale:g}" if config.strategy.precision == "float16" else ""
    outputs.say(f"step {step}: {why}, so all ranks left this update out; {skipped} so far{told}")
    if outputs.folder is not None:
        outputs.folder.append(SKIPPED, [record(step, loss, norm, samples)])


def record(step: int, loss: float, norm: float, samples: Samples) -> dict[str, Any]:
    """A line of skipped.jsonl.

    Returns:
        "step", from 1; "loss", its mean over tokens, and "norm", the gradient's, None if no number or infinite;
        "samples", by rank and micro-batch: sample i is the training text's tokens from i times the context on.
    """
    return {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,
        "norm": norm if math.isfinite(norm) else None,
        "samples": samples,
    }


def require_progress(config: TrainConfig, step: int, skips_in_a_row: float) -> None:
    """Stops a run that has ceased to learn.

    Raises:
        Diverged: Too many updates in a row were left out.
    """
    if skips_in_a_row < MOST_IN_A_ROW:
        return
    low = config.strategy.precision == "float16"
    advice = "choose strategy.precision bfloat16, whose range is wider, " if low else ""
    what = "not finite or stood out" if config.optim.skip_spikes else "not finite"
    raise Diverged(
        f"the gradient was {what} in {MOST_IN_A_ROW} steps in a row, the last of them step {step}: training has "
        f"diverged; {advice}lower optim.lr or lengthen optim.warmup, and look at the data ({SKIPPED} in the run's "
        "folder has the samples)",
        step - int(skips_in_a_row) + 1,
        step,
    )
