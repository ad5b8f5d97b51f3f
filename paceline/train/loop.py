"""The training run: data, model, loop. One step can be followed from here into the engine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

import paceline as pl
from paceline.checkpoint.folder import CHECKPOINTS, set_aside
from paceline.comm.devices import strategy_on
from paceline.comm.patience import StepPatience
from paceline.data.samples import LeftOut
from paceline.engine.recovery import close
from paceline.launch.cores import CROWDED, threads_per_rank
from paceline.launch.screen import show
from paceline.launch.seat import Seat
from paceline.launch.stop import StopRequest, ended_at_once, exit_status
from paceline.models.flops import flops_per_token, peak_flops
from paceline.train.alike import require_alike, settings_of_all
from paceline.train.build import build_model, make_parallel, make_update, open_loader, prepare_text, text_marks
from paceline.train.checkpoints import Checkpoints, begin_from, left_out_of, load_checkpoint
from paceline.train.config import TrainConfig, check_ranks
from paceline.train.failover import Found, LeaveJob, go_on
from paceline.train.finish import finish
from paceline.train.forecast import begin, planned
from paceline.train.former import Former
from paceline.train.held_out import validate_shown
from paceline.train.kept import Kept, share
from paceline.train.meter import Meter, Readback
from paceline.train.metrics import check_trackers
from paceline.train.not_finite import marks
from paceline.train.optim import learning_rate
from paceline.train.outputs import Outputs
from paceline.train.resume import Resume, as_planned, find_resume
from paceline.train.rewind import run_and_go_back
from paceline.train.run_folder import RunFolder, check_run_folder, create_run_folder
from paceline.train.samples import write_samples
from paceline.train.skipped import require_progress, tell_skipped
from paceline.train.status_text import TrainingProgress
from paceline.train.summary import SAVING, crowded, opening, validation_line
from paceline.train.training import Training


def train(config: TrainConfig, former: Former | None = None, seat: Seat | None = None) -> int:
    """Trains as one rank of the job found in the environment.

    Args:
        config: All settings.
        former: What is left of the job before, where ranks are replaced; what this one leaves is put there.
        seat: This rank's, where ranks are replaced.

    Returns:
        The exit status: 0, or 130 or 143 after Ctrl-C or SIGTERM.

    Raises:
        UserError: The data, the configuration or the environment does not do, or the weights could not be saved.
        LeaveJob: There are to be more ranks.
    """
    did = _nothing if former is None else former.did
    with ended_at_once():
        world = pl.init() if config.timeout is None else pl.init(timeout=config.timeout)
    did("meeting")
    check_ranks(config := settings_of_all(config), world.world_size)
    if seat is None and config.workers not in (None, world.world_size) and world.rank == 0:
        show(
            f"note: workers is {config.workers}, but this process joined a job of {world.world_size} ranks; "
            "the job decides",
            warning=True,
        )
    threads = threads_per_rank(config.threads, world.local_world_size)
    torch.set_num_threads(threads)
    config = replace(config, strategy=strategy_on(config.strategy, world.device))
    if former is None or seat is None or seat.place is None:
        found = Found(find_resume(config))
    else:
        found = go_on(config, former, seat.place)
    resume = found.resume
    did("state")
    if world.rank == 0:
        if resume is None:
            check_run_folder(config.folder)
        check_trackers(config.log)
    goes_on = former is not None and former.run is not None
    corpus = former.corpus if former is not None else None
    if corpus is None:
        corpus = prepare_text(config, world, is_known=goes_on)
    require_alike(text := text_marks(corpus), "texts", "Let data.path be the same text on every host.")
    did("text")
    measured = None
    if config.plan == "auto":
        if resume is not None:
            config = as_planned(config, resume)
            if world.rank == 0 and not goes_on:
                show(f"plan: auto is for new runs: {resume.run} keeps the strategy and the micro-batch that it has")
        else:
            say = show if world.rank == 0 else _nothing
            config, measured = planned(config, config.model.shape(corpus.facts.vocabulary), world, say)
        config = replace(config, plan="")
        if seat is not None:
            seat.has_planned({"zero": config.strategy.zero, "shard": config.strategy.shard})
    before = None if former is None else former.before
    forecast = begin(world, config.strategy.recompute != "none", before, measured)
    if former is not None:
        former.settle_imports()
    kept = former.kept if former is not None else None
    if kept is None:
        model = build_model(config, corpus, world, has_weights=not found.is_kept)
        kept = Kept(model, make_update(config, model, world))
    else:
        make_parallel(kept.model, config, world)
    model, update = kept.model, kept.update
    did("model")
    first, begun = 0, None
    left_out: LeftOut = ()
    if found.is_kept:
        if found.someone_lacks:
            share(kept, found.has_all)
        first, left_out = update.done, kept.left_out
    elif resume is not None and resume.checkpoint is not None:
        loaded = load_checkpoint(resume.checkpoint, model, update, text)
        first, left_out = loaded.step, left_out_of(loaded)
    elif config.weights is not None:
        begun = begin_from(config.weights, model)
    update.done = first
    did("loading")
    opened = open_loader(config, corpus, model, world, first, left_out)
    with opened as loader, former.stop if former else StopRequest() as stop:
        # The folder comes last of what may fail, so that a mistake leaves none behind.
        folder = _run_folder(config, resume) if world.rank == 0 else None
        with Outputs(world, folder, TrainingProgress(config.steps)) as outputs:
            if folder is not None:
                outputs.begin(replace(config, resume=None), corpus, threads, is_known=goes_on)
                if not goes_on:
                    outputs.say(*opening(config, corpus, model.config, world, threads, folder.path, first))
                if begun is not None:
                    outputs.say(f"weights: step {begun.step:,} of {begun.path}")
                if resume is not None:
                    _tell_resumed(outputs, folder, first, former, resume)
            (path, *_) = pl.all_gather_json(None if folder is None else str(folder.path.resolve()), "the run's folder")
            since = None if former is None else former.saved
            checkpoints = Checkpoints(Path(path), config.checkpoint, model, update, world, text, first, left_out, since)
            interruption = None if former is None else former.interruption
            training = Training(
                config, corpus, model, update, loader, first, outputs, stop, checkpoints, forecast, seat, interruption
            )
            if former is not None:
                former.begins(training, Path(path))
            did("opening")
            status = run_and_go_back(_run, training, former)
    # Nobody needs it whole, and whole it may not fit.
    close(pl.engine_of(model), whole=False)
    pl.shutdown()
    return status


def _nothing(*_: object) -> None:
    """Says nothing, as all ranks but 0 do."""


def _run_folder(config: TrainConfig, resume: Resume | None) -> RunFolder:
    return create_run_folder(config.folder, config.model.preset) if resume is None else RunFolder(resume.run)


def _tell_resumed(outputs: Outputs, folder: RunFolder, first: int, former: Former | None, resume: Resume) -> None:
    """Says and logs what step the run goes on from, and how long it was interrupted."""
    ranks = outputs.world.world_size
    figures: dict[str, float | int] = {"run/resumed_from": first, "run/ranks": ranks}
    if former is not None:
        source = "memory" if resume.from_memory else "the latest checkpoint" if first else "the beginning"
        line = f"{ranks} rank{'s go' if ranks > 1 else ' goes'} on after step {first:,}, from {source}"
        if former.left is not None:
            figures["run/interrupted_seconds"] = time.monotonic() - former.left
            line += f", {figures['run/interrupted_seconds']:.2f} s after the job before ended"
        outputs.say(line)
    outputs.log(figures, first)
    if aside := set_aside(folder.path / CHECKPOINTS, first):
        outputs.say(f"checkpoints of later steps are in {aside[0].parent} now")


def _run(training: Training) -> int:
    """Trains, validates, saves and sums up; returns the exit status."""
    outputs = training.outputs
    began = time.perf_counter() - sum(outputs.seconds.values())
    step, status = _steps(training)
    return finish(training, step, status, time.perf_counter() - began - sum(outputs.seconds.values()))


def _steps(training: Training) -> tuple[int, int]:
    """Trains; returns the number of the last step, and the exit status if a stop was asked for."""
    config, corpus, model, outputs, first = (
        training.config, training.corpus, training.model, training.outputs, training.first
    )  # fmt: skip
    update, loader, checkpoints = training.update, training.loader, training.checkpoints
    engine, world, log = pl.engine_of(model), outputs.world, config.log
    low = config.strategy.precision == "float16"
    readback, peak = Readback(), None
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device), config.multiplies_in(world.device.type))
    meter = Meter(engine, config.steps, flops_per_token(model.config, model.config.context), peak)
    events_due, skipped = first + log.events_every, int(update.skips[0])
    patience = StepPatience(given=config.timeout is not None)
    for step, batches in zip(range(first + 1, config.steps + 1), loader, strict=False):
        is_told = _is_read(config, step, first) and (step >= events_due or step == config.steps)
        soon = any(_is_read(config, number, first) for number in (step, step + 1))
        meter.record(soon, norms=log.gradient_norms and is_told)
        for batch in pl.accumulate(model, batches):
            loss = model(batch.inputs, batch.targets)
            asked = (*training.stop.flags(), training.leaves(), checkpoints.asked())
            engine.count(batch.tokens, loss, *asked, *marks(loss, world.rank))
            (loss * update.scale).backward()
        counts = engine.counts()
        norm = update(step - 1, counts[0], counts[1], engine.norm.as_reduced())
        meter.add(counts[:2], torch.isfinite(norm), loader.wait_seconds)
        patience.step()
        if log.samples:
            write_samples(outputs, loader, step)

        figures = torch.cat([update.skips, norm.reshape(1), update.scale.reshape(1)]).double()
        at, state = readback.exchange(step, torch.cat([counts, figures]))
        tokens, nats, interrupts, terminations, leaves, due, *marked, skips, skips_in_a_row, at_norm, scale = state
        outputs.progress.step(at, tokens, nats)
        if skips > skipped:
            skipped = int(skips)
            samples = loader.shares(at - 1)
            tell_skipped(outputs, config, at, skipped, nats / tokens, at_norm, marked, scale, samples)
        require_progress(config, at, skips_in_a_row)
        status = exit_status(interrupts, terminations)
        last = step == config.steps or bool(status)
        if _is_read(config, step, first) or last:
            rate = learning_rate(step - 1, config.steps, config.optim)
            interval, of_step = meter.read(step, norm, rate, skipped)
            outputs.say(interval.line(outputs.columns))
            if step > first + 1:
                training.forecast.add(interval.step_seconds, interval.crowded_fraction, world.device)
                outputs.progress.exposed(interval.exposed_fraction)
                if interval.crowded_fraction > CROWDED:
                    outputs.say_once("crowded", crowded(interval.crowded_fraction))
            scales = {"train/loss_scale": scale} if low else {}
            for each in (interval.figures() | scales, *checkpoints.figures()):
                outputs.log(each, step)
            if log.events_every and (step >= events_due or last):
                events_due = step + log.events_every
                if outputs.folder is not None:
                    for name, lines in of_step.items():
                        outputs.folder.append(name, lines)
        if training.interruption is not None and not training.interruption.is_over:
            outputs.log(training.interruption.stepped(), step)
        if training.seat is not None:
            training.seat.has_stepped(str(checkpoints.path.parent))
        if last:
            patience.pause()
            return step, status
        if leaves:
            checkpoints.finish(outputs.say)
            raise LeaveJob
        checkpoints.save_if_due(step, bool(due), outputs.say, patience.pause)
        if log.validate_every and step % log.validate_every == 0:
            patience.pause()
            with meter.paused():
                outputs.progress.pause()
                result = validate_shown(training, log.validate_batches)
                if result is not None:
                    outputs.say(validation_line(result, corpus, step))
                    outputs.log(result.figures(corpus.facts), step)
                with outputs.showing(SAVING):
                    outputs.save(model)
    return first, 0


def _is_read(config: TrainConfig, step: int, first: int) -> bool:
    """Whether figures are told after a step, of a training that goes on from step `first`."""
    return step in (first + 1, config.steps) or step % config.log.every == 0
