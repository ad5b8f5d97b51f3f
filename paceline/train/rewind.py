"""A run that has diverged goes back to a checkpoint, and on without the samples that led from there to where it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.comm.patience import StepPatience
from paceline.core.errors import UserError
from paceline.data.samples import batch_number
from paceline.train.former import Former
from paceline.train.run_folder import SKIPPED
from paceline.train.skipped import Diverged
from paceline.train.training import Training


def run_and_go_back(run: Callable[[Training], int], training: Training, former: Former | None) -> int:
    """Runs a training, and goes back where it diverges, if the configuration says so; returns what `run` does.

    Args:
        run: Trains.
        training: To begin with.
        former: Gets what would be left if another rank were lost.

    Raises:
        UserError: It has diverged, and stops.
    """
    while True:
        if former is not None:
            former.training = training
        try:
            return run(training)
        except Diverged as diverged:
            if training.config.optim.on_divergence != "rewind":
                raise
            if former is not None:
                # What is half loaded must not be handed on.
                former.training = None
            training = go_back(training, diverged)


def go_back(training: Training, diverged: Diverged) -> Training:
    """Goes back to the latest checkpoint from before the steps that were left out. A collective call.

    All samples since then are left out, and not those of the bad steps alone (as Chowdhery et al. 2022 did for PaLM):
    the steps before these would come to the same weights again. It ends because each time a later checkpoint is needed.

    Args:
        training: That has diverged.
        diverged: Where.

    Returns:
        What to go on with.

    Raises:
        UserError: There is no such checkpoint, or none since the run went back last.
    """
    checkpoints, loader, outputs = training.checkpoints, training.loader, training.outputs
    outputs.progress.pause()
    StepPatience().pause()
    step = checkpoints.latest_before(diverged.first, outputs.say)
    if step is None:
        raise UserError(
            f"{diverged}. There is no checkpoint from before step {diverged.first} to go back to: save them more often "
            "(checkpoint.every), or keep more of them (checkpoint.keep)"
        ) from diverged
    earlier = max((each for each, _ in loader.left_out), default=-1)
    if step <= earlier:
        raise UserError(
            f"{diverged}. The run has been back at step {earlier} before, and diverges with other samples, too"
        ) from diverged
    gone = [
        {"step": each, "rewound_to": step, "samples": loader.shares(each - 1)}
        for each in range(step + 1, diverged.last + 1)
    ]
    next_batch = batch_number(diverged.last, loader.left_out)
    before = checkpoints.go_back(step)
    left_out = (*before, (step, next_batch - batch_number(step, before)))
    checkpoints.left_out = left_out
    loader.go_to(step, left_out)
    outputs.say(
        f"{diverged}. Going back to the checkpoint of step {step}, and on without the samples of steps {step + 1} to "
        f"{diverged.last}, which {SKIPPED} names"
    )
    outputs.log({"run/resumed_from": step, "run/left_out_batches": len(gone)}, step)
    if outputs.folder is not None:
        outputs.folder.append(SKIPPED, gone)
    return replace(training, first=step)
