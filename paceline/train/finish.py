"""What a run ends with: it is validated, saved and summed up."""

from __future__ import annotations

from contextlib import nullcontext

import paceline as pl
from paceline.launch.stop import exit_status
from paceline.train.held_out import validate_shown
from paceline.train.summary import SAMPLING, SAVING, next_steps, sample, stopped, summary
from paceline.train.training import Training


def finish(training: Training, step: int, status: int, seconds: float) -> int:
    """Validates, saves and sums up; returns the exit status. A collective call.

    Args:
        training: Is over.
        step: The last one.
        status: The exit status if a stop was asked for, else 0.
        seconds: What training took.

    Raises:
        UserError: The weights could not be saved.
    """
    config, corpus, model, outputs, first = (
        training.config, training.corpus, training.model, training.outputs, training.first
    )  # fmt: skip
    last = None
    if not status:
        last = validate_shown(training, config.log.batches_at_end(config.steps))
        status = exit_status(*map(sum, zip(*pl.all_gather_json(training.stop.flags(), "whether to stop"), strict=True)))
    if last is not None:
        outputs.log(last.figures(corpus.facts), step)
    with outputs.showing(SAVING):
        # Of a checkpoint that fails nothing is left, which makes room.
        checkpoint = training.checkpoints.save_at_end(step, outputs.say)
        for figures in training.checkpoints.figures():
            outputs.log(figures, step)
        failure = outputs.save_at_end(model)
    for tracker in outputs.trackers:
        tracker.finish()
    # Lets rank 0 alone write a sample: no other rank may be needed for it. GPUs that hold shards may lack the memory.
    apart = outputs.world.backend == "nccl" and pl.engine_of(model).forward.whole.takes_memory
    with nullcontext() if apart else pl.full_parameters(model):
        if outputs.folder is not None:
            path = outputs.folder.path
            if status:
                lines = stopped(path, step, saved=failure is None, resumable=checkpoint is not None)
            elif failure is not None:
                lines = summary(config, corpus, model, outputs, step - first, seconds, last)
            else:
                with outputs.showing(SAMPLING):
                    text = [] if apart else sample(config, path, model)
                lines = [
                    *text,
                    *summary(config, corpus, model, outputs, step - first, seconds, last),
                    *training.forecast.told(config, model.config, outputs.world, outputs.folder),
                    *next_steps(config, outputs.world, path),
                ]
            outputs.say(*lines, *outputs.folder.describe_problems())
    if failure is not None:
        raise failure
    return status
