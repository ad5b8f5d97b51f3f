"""What the screen says before and after a training run."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.comm.world import World
from paceline.data import Corpus
from paceline.models.config import ModelConfig
from paceline.models.flops import parameter_count
from paceline.models.transformer import Transformer
from paceline.train.config import TrainConfig
from paceline.train.metrics import duration
from paceline.train.run_folder import LATEST, RUNS
from paceline.train.sample import continuation
from paceline.train.validate import Validation

SAMPLE_TOKENS = 120
CODE_PROMPT = "import os\n\n\ndef "
"""Begins a sample where the text is Python's library; the user's own text speaks from the start of a document."""


def opening(
    config: TrainConfig, corpus: Corpus, shape: ModelConfig, world: World, threads: int, path: Path
) -> list[str]:
    """The model, the ranks, the work ahead and the run's folder."""
    strategy = config.strategy
    packing = {"bucket": f"buckets of {strategy.bucket_mb:g} MiB", "parameter": "one by one", "flat": "one flat buffer"}
    when = {"overlap": "during backward", "after": "after backward"}
    tokens = config.batch * shape.context
    epochs = config.steps * tokens / max(1, corpus.facts.train.tokens)
    return [
        f"model: {config.model.preset}, {parameter_count(shape) / 1e6:,.2f} M parameters: {shape.layers} layers, "
        f"width {shape.width}, {shape.heads} heads, context {shape.context}, vocabulary {shape.vocabulary:,}",
        f"ranks: {world.world_size} ({world.local_world_size} on this host), {world.device.type}, "
        f"{threads} thread{'s' * (threads > 1)} each; gradients {packing[strategy.packing]}, "
        f"{strategy.collective.replace('_', '-')} {when[strategy.synchronize]}",
        f"training: {config.steps:,} steps of {config.batch} x {shape.context} = {tokens:,} tokens "
        f"({epochs:.2f} epochs), AdamW, learning rate {config.optim.lr:g}, {config.optim.schedule}",
        f"run folder: {path}   (Ctrl-C stops after a step and saves the weights)",
    ]


def validation_line(result: Validation, corpus: Corpus, step: int) -> str:
    """A validation on the way."""
    part = "all" if result.share == 1 else f"{100 * result.share:.0f} %"
    return (
        f"validation at step {step}, on {part} of the held-out text: {result.bits_per_byte:.3f} bits per byte "
        f"(gzip {corpus.facts.gzip_bits_per_byte:.3f}), loss {result.loss:.4f}"
    )


def stopped(path: Path, step: int, saved: bool) -> list[str]:
    """The end of a run that was asked to stop."""
    if not saved:
        return [f"stopped after step {step}"]
    return [
        f"stopped after step {step}; the weights are in {path}",
        f'  paceline sample {_short(path)} --prompt "def "',
    ]


def summary(
    config: TrainConfig,
    corpus: Corpus,
    model: Transformer,
    world: World,
    path: Path,
    steps: int,
    seconds: float,
    result: Validation | None,
) -> list[str]:
    """The end of a finished run: figures, a sample, the folder, and what to try next."""
    facts = corpus.facts
    tokens = steps * config.batch * model.config.context
    prompt = "" if config.data.path else CODE_PROMPT
    lines = ["", f"a sample, begun with {prompt!r}:" if prompt else "a sample:", ""]
    generator = torch.Generator().manual_seed(config.seed)
    text = continuation(model, corpus.tokenizer, prompt, SAMPLE_TOKENS, temperature=0.6, top_k=40, generator=generator)
    lines += [f"    {line}" for line in text.splitlines()]
    lines += [""]
    if result is not None:
        lines += [
            f"bits per byte on the held-out text ({facts.validation.documents:,} documents, "
            f"{facts.validation.bytes:,} bytes):",
            f"    this model  {result.bits_per_byte:.3f}",
            f"    gzip -9     {facts.gzip_bits_per_byte:.3f}",
            f"    xz -9e      {facts.xz_bits_per_byte:.3f}",
        ]
    short = _short(path)
    workers = f" --workers {world.world_size}" if config.workers else ""
    preset = "small" if config.model.preset in ("nano", "tiny") else f"{config.model.preset} --data.path FOLDER"
    return [
        *lines,
        f"trained {steps:,} steps on {world.world_size} rank{'s' * (world.world_size > 1)} in {duration(seconds)}, "
        f"{tokens / seconds:,.0f} tokens/s with validation",
        f"run folder: {path}",
        "next:",
        f'    paceline sample {short} --prompt "class "',
        f"    paceline trace {short}",
        f"    paceline train --model.preset {preset}{workers}",
    ]


def _short(path: Path) -> str:
    """What to type for a run: the short name if it is still the newest one."""
    latest = Path(RUNS, LATEST)
    return str(latest) if latest.resolve() == path.resolve() else str(path)
