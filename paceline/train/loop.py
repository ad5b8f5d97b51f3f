"""The training run: data, model, loop. One step can be followed from here into the engine."""

from __future__ import annotations

import time

import torch

import paceline as pl
from paceline.comm.world import World
from paceline.data import Corpus, prepare
from paceline.data.loader import Loader
from paceline.errors import UserError
from paceline.models.flops import flops_per_token, peak_flops
from paceline.models.transformer import Transformer
from paceline.train.config import TrainConfig, check_shares
from paceline.train.launch import threads_per_rank
from paceline.train.loss_scale import LossScale
from paceline.train.meter import Meter, Readback
from paceline.train.not_finite import marks, whose, whose_gradient
from paceline.train.optim import Update, learning_rate
from paceline.train.outputs import Outputs
from paceline.train.run_folder import EVENTS, WEIGHTS, choose_run_folder, create_run_folder
from paceline.train.screen import show
from paceline.train.stop import StopRequest, exit_status
from paceline.train.summary import opening, stopped, summary, validation_line
from paceline.train.validate import Validation, validate

MOST_SKIPS_IN_A_ROW = 10
HEAD_START_SECONDS = 0.2


def train(config: TrainConfig) -> int:
    """Trains as one rank of the job found in the environment.

    Returns:
        The exit status: 0, or 130 or 143 after Ctrl-C or SIGTERM.

    Raises:
        UserError: The data, the configuration or the environment does not do, or the weights could not be saved.
    """
    world = pl.init()
    check_shares(config.batch, world.world_size)
    if config.workers not in (None, world.world_size) and world.rank == 0:
        show(
            f"note: workers is {config.workers}, but this process joined a job of {world.world_size} ranks; "
            "the job decides",
            warning=True,
        )
    threads = threads_per_rank(config.threads, world.local_world_size)
    torch.set_num_threads(threads)
    path = choose_run_folder(config.folder, config.model.preset) if world.rank == 0 else None
    corpus = _prepare(config, world)
    model = _build(config, corpus, world)
    with _open_loader(config, corpus, model, world) as loader:
        # The folder comes last of what may fail, so that a mistake leaves none behind.
        outputs = Outputs(world, create_run_folder(path) if path is not None else None)
        if path is not None:
            outputs.begin(config, corpus, threads)
            show(*opening(config, corpus, model.config, world, threads, path))
        with StopRequest() as stop:
            status = _run(config, corpus, model, outputs, stop, loader)
    pl.release(model)
    pl.shutdown()
    return status


def _prepare(config: TrainConfig, world: World) -> Corpus:
    if world.rank == 0:
        return prepare(config.data, report=show)
    # One process prepares while the others wait for its lock; it should be the one with the screen.
    time.sleep(HEAD_START_SECONDS)
    return prepare(config.data)


def _build(config: TrainConfig, corpus: Corpus, world: World) -> Transformer:
    torch.manual_seed(config.seed)
    with torch.device(world.device):
        model = Transformer(config.model.shape(corpus.facts.vocabulary))
    return pl.parallelize(model, config.strategy)


def _open_loader(config: TrainConfig, corpus: Corpus, model: Transformer, world: World) -> Loader:
    return Loader(
        corpus.train,
        context=model.config.context,
        batch_size=config.batch,
        micro_batch=config.micro_batch,
        rank=world.rank,
        world_size=world.world_size,
        seed=config.seed,
        device=world.device,
    )


def _run(
    config: TrainConfig, corpus: Corpus, model: Transformer, outputs: Outputs, stop: StopRequest, loader: Loader
) -> int:
    """Trains, validates, saves and sums up; returns the exit status."""
    began = time.perf_counter()
    step, status = _steps(config, corpus, model, outputs, stop, loader)
    seconds = time.perf_counter() - began
    last = None
    if not status:
        last = validate(
            model,
            corpus.validation,
            context=model.config.context,
            micro_batch=config.micro_batch,
            stopped=lambda: bool(stop.received),
        )
        status = exit_status(*map(sum, zip(*pl.all_gather_json(stop.flags()), strict=True)))
    if last is not None:
        outputs.log(_figures(last, corpus), step)
    saved = outputs.save(model)
    for tracker in outputs.trackers:
        tracker.finish()
    # The summary lets rank 0 alone write a sample, so no other rank may be needed for it.
    with pl.full_parameters(model):
        if outputs.folder is not None:
            lines = stopped(outputs.folder.path, step, saved) if status else ()
            lines = lines or summary(config, corpus, model, outputs.world, outputs.folder.path, step, seconds, last)
            show(*lines, *outputs.folder.describe_problems())
    if outputs.folder is not None and not saved:
        raise UserError(f"the weights could not be saved: {outputs.folder.problems[WEIGHTS]}")
    return status


def _steps(
    config: TrainConfig, corpus: Corpus, model: Transformer, outputs: Outputs, stop: StopRequest, loader: Loader
) -> tuple[int, int]:
    """Trains; returns how many steps were done, and the exit status if a stop was asked for."""
    engine, world, log = pl.engine_of(model), outputs.world, config.log
    low, tokens = config.strategy.precision == "float16", config.micro_batch * model.config.context
    loss_scale = LossScale(tokens, world.device) if low else None
    update = Update(model, config.optim, config.steps, world.device, loss_scale)
    readback = Readback()
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    meter = Meter(engine, config.steps, flops_per_token(model.config, model.config.context), peak)
    events_due, skipped = log.events_every, 0
    for step, batches in zip(range(1, config.steps + 1), loader, strict=False):
        for batch in pl.accumulate(model, batches):
            loss = model(batch.inputs, batch.targets)
            engine.count(batch.tokens, loss, *stop.flags(), *marks(loss, world.rank))
            loss.backward(update.scale)
        counts = engine.counts()
        norm = update(step - 1, counts[0], engine.reduced_norm())
        meter.add(counts[:2], torch.isfinite(norm), loader.wait_seconds)

        figures = torch.cat([update.skips, norm.reshape(1), update.scale.reshape(1)]).double()
        at, state = readback.exchange(step, torch.cat([counts[2:], engine.culprits(), figures]))
        interrupts, terminations, *marked, culprits, numbers, skips, skips_in_a_row, at_norm, scale = state
        if skips > skipped:
            skipped = int(skips)
            outputs.say(
                f"step {at}: the gradient is not finite (its norm is {at_norm}; "
                f"{whose(*marked) or whose_gradient(culprits, numbers)}), so all ranks left this update out; "
                f"{skipped} so far{f'; the loss scale is now {scale:g}' if low else ''}"
            )
            if not (low or any(marked)):
                # A loss scale overflows on purpose. Else it is worth a pass over the gradients to know whose they are.
                engine.look_at_gradients()
        if skips_in_a_row >= MOST_SKIPS_IN_A_ROW:
            advice = "choose strategy.precision bfloat16, whose range is wider, " if low else ""
            raise UserError(
                f"the gradient was not finite in {MOST_SKIPS_IN_A_ROW} steps in a row, the last of them step {at}: "
                f"training has diverged; {advice}lower optim.lr or lengthen optim.warmup, and look at the data"
            )
        status = exit_status(interrupts, terminations)
        last = step == config.steps or bool(status)
        if step == 1 or step % log.every == 0 or last:
            interval, events = meter.read(step, norm, learning_rate(step - 1, config.steps, config.optim), skipped)
            outputs.say(interval.line())
            outputs.log(interval.figures() | ({"train/loss_scale": scale} if low else {}), step)
            if log.events_every and outputs.folder is not None and (step >= events_due or last):
                outputs.folder.append(EVENTS, events)
                events_due = step + log.events_every
        if status:
            return step, status
        if log.validate_every and step % log.validate_every == 0 and not last:
            with meter.paused():
                _validate_on_the_way(config, corpus, model, outputs, step)
    return config.steps, 0


def _validate_on_the_way(config: TrainConfig, corpus: Corpus, model: Transformer, outputs: Outputs, step: int) -> None:
    result = validate(
        model,
        corpus.validation,
        context=model.config.context,
        micro_batch=config.micro_batch,
        samples=config.log.validate_batches * config.batch,
    )
    if result is not None:
        outputs.say(validation_line(result, corpus, step))
        outputs.log(_figures(result, corpus), step)
    outputs.save(model)


def _figures(result: Validation, corpus: Corpus) -> dict[str, float | int]:
    return {
        "val/loss": result.loss,
        "val/bits_per_byte": result.bits_per_byte,
        "val/gzip_bits_per_byte": corpus.facts.gzip_bits_per_byte,
        "val/xz_bits_per_byte": corpus.facts.xz_bits_per_byte,
        "val/share": result.share,
        "val/seconds": result.seconds,
    }
