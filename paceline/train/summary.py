"""What the screen says before and after a training run."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.comm.world import World
from paceline.data import Corpus
from paceline.launch.screen import visible
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count
from paceline.models.transformer import Transformer
from paceline.train.config import TrainConfig
from paceline.train.metrics import duration
from paceline.train.outputs import Outputs
from paceline.train.run_folder import LATEST, RUNS, TOKENIZER
from paceline.train.sample import continuation
from paceline.train.validate import Validation

VALIDATING = "validating"
SAVING = "saving the weights"
SAMPLING = "writing a sample"
"""What a run does besides training."""
SAMPLE_TOKENS = 120
CODE_PROMPT = "import os\n\n\ndef "
"""Begins a sample where the text is Python's library; the user's own text speaks from the start of a document."""


def opening(
    config: TrainConfig, corpus: Corpus, shape: ModelConfig, world: World, threads: int, path: Path, first: int
) -> list[str]:
    """The model, the ranks, the work ahead and the run's folder; the step that a resumed run goes on from."""
    strategy = config.strategy
    packing = {"bucket": f"buckets of {strategy.bucket_mb:g} MiB", "parameter": "one by one", "flat": "one flat buffer"}
    when = {"overlap": "during backward", "after": "after backward"}
    tokens = config.batch * shape.context
    epochs = config.steps * tokens / max(1, corpus.facts.train.tokens)
    return [
        f"model: {config.model.preset}, {parameter_count(shape) / 1e6:,.2f} M parameters: {shape.layers} layers, "
        f"width {shape.width}, {shape.heads} heads, context {shape.context}, vocabulary {shape.vocabulary:,}",
        f"ranks: {world.world_size} ({world.local_world_size} on this host), {world.device.type} in "
        f"{config.multiplies_in(world.device.type)}, {threads} thread{'s' * (threads > 1)} each; "
        f"gradients {packing[strategy.packing]}, {strategy.collective.replace('_', '-')} {when[strategy.synchronize]}",
        f"training: {config.steps:,} steps of {config.batch} x {shape.context} = {tokens:,} tokens "
        f"({epochs:.2f} epochs), AdamW, learning rate {config.optim.lr:g}, {config.optim.schedule}",
        f"run folder: {path}   (Ctrl-C stops after a step and saves all that --resume needs)",
        *([f"going on after step {first:,}"] if first else []),
    ]


def validation_line(result: Validation, corpus: Corpus, step: int) -> str:
    """A validation on the way."""
    return (
        f"validation at step {step}, on {_part(result)}: {result.bits_per_byte:.3f} bits per byte "
        f"(gzip {corpus.facts.gzip_bits_per_byte:.3f}), loss {result.loss:.4f}"
    )


def crowded(fraction: float) -> str:
    """Why a run is slow for which other work leaves too few cores."""
    return (
        f"note: for {100 * fraction:.0f} % of the time other work had the cores that this run could have used; "
        "until it ends, fewer --threads or --workers may be quicker"
    )


def stopped(path: Path, step: int, *, saved: bool, resumable: bool) -> list[str]:
    """The end of a run that was asked to stop."""
    return [
        f"stopped after step {step}" + (f"; the weights are in {path}" if saved else ""),
        *([f"  paceline train --resume {_short(path)}"] if resumable else []),
        *([f'  paceline sample {_short(path)} --prompt "def "'] if saved else []),
    ]


def sample(config: TrainConfig, path: Path, model: Transformer) -> list[str]:
    """Text that the model wrote, with the tokenizer in the run's folder."""
    prompt = "" if config.data.path else CODE_PROMPT
    generator = torch.Generator().manual_seed(config.seed)
    text = continuation(model, path / TOKENIZER, prompt, SAMPLE_TOKENS, temperature=0.6, top_k=40, generator=generator)
    begun = f"a sample, begun with {prompt!r}:" if prompt else "a sample:"
    return ["", begun, "", *(f"    {line}" for line in visible(text).splitlines()), ""]


def summary(
    config: TrainConfig,
    corpus: Corpus,
    model: Transformer,
    outputs: Outputs,
    steps: int,
    seconds: float,
    result: Validation | None,
) -> list[str]:
    """The figures of a finished training, and what took how long.

    Args:
        config: The run's.
        corpus: Its text.
        model: Its model.
        outputs: Knows how long validating and saving took.
        steps: Steps trained.
        seconds: How long they took.
        result: Of the last validation, if there is held-out text.
    """
    facts, ranks = corpus.facts, outputs.world.world_size
    tokens = steps * config.batch * model.config.context
    took = outputs.seconds
    lines = [
        f"trained {steps:,} steps on {ranks} rank{'s' * (ranks > 1)} in {duration(seconds)}, "
        f"{tokens / seconds:,.0f} tokens/s; validating took {duration(took[VALIDATING])}, "
        f"saving {duration(took[SAVING])}"
    ]
    if result is None:
        return lines
    return [
        f"bits per byte on {_part(result)} ({facts.validation.documents:,} documents, "
        f"{facts.validation.bytes:,} bytes):",
        f"    this model  {result.bits_per_byte:.3f}",
        f"    gzip -9     {facts.gzip_bits_per_byte:.3f}",
        f"    xz -9e      {facts.xz_bits_per_byte:.3f}",
        *lines,
    ]


def next_steps(config: TrainConfig, world: World, path: Path) -> list[str]:
    """The folder, and what to try next."""
    short = _short(path)
    workers = f" --workers {world.world_size}" if config.workers else ""
    preset = "small" if config.model.preset in ("nano", "tiny") else f"{config.model.preset} --data.path FOLDER"
    return [
        f"run folder: {path}",
        "next:",
        f'    paceline sample {short} --prompt "class "',
        f"    paceline report {short}",
        *([f"    paceline trace {short}"] if config.log.events_every else []),
        f"    paceline train --model.preset {preset}{workers}",
    ]


def _part(result: Validation) -> str:
    share = 100 * result.share
    return "the held-out text" if result.share == 1 else f"{share:.{0 if share >= 1 else 2}f} % of the held-out text"


def _short(path: Path) -> str:
    """What to type for a run: the short name if it is still the newest one."""
    latest = Path(RUNS, LATEST)
    return str(latest) if latest.resolve() == path.resolve() else str(path)
