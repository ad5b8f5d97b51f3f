"""Sections of a training's configuration: its model, optimizer, logs and checkpoints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from paceline.core.errors import UserError
from paceline.models.config import ModelConfig

_TIME = re.compile(r"\d+(\.\d+)?[smh]")


@dataclass(frozen=True)
class ModelSection(ModelConfig):
    """The model's shape: a preset, and every field of it to override.

    Raises:
        UserError: The fields describe no model.
    """

    vocabulary: int = 0
    """Rows of the token embedding; 0 means as many as the tokenizer has entries."""
    preset: str = "tiny"
    """The shape to start from: nano, tiny, small, gpt2-124m, gpt2-350m, gpt2-1.5b, llama-1b, llama-8b, llama-70b or
    llama2-7b. It also brings matching training settings."""

    def __post_init__(self) -> None:
        if self.vocabulary < 0:
            raise UserError(f"model: vocabulary must be 0 (as the tokenizer has) or positive, got {self.vocabulary}")
        try:
            self.shape(1)
        except UserError as error:
            raise UserError(f"model: {error}") from None

    def shape(self, tokens: int) -> ModelConfig:
        """The shape for a tokenizer of `tokens` entries.

        Raises:
            UserError: `vocabulary` is given and has no room for them.
        """
        if 0 < self.vocabulary < tokens:
            raise UserError(
                f"model.vocabulary is {self.vocabulary}, but the tokenizer has {tokens} entries: "
                f"leave it at 0 or choose at least {tokens}"
            )
        values = {item.name: getattr(self, item.name) for item in fields(ModelConfig)}
        return ModelConfig(**{**values, "vocabulary": self.vocabulary or tokens})


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate over time.

    Raises:
        UserError: A value is out of its range.
    """

    lr: float = 3e-3
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the square root of the second mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay, of matrices only: biases and norms have none."""
    warmup: float = 0.05
    """Length of the linear warmup: below 1 a fraction of the steps, from 1 up a number of steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warmup."""
    final_lr_fraction: float = 0.02
    """Learning rate of the last step as a fraction of the highest; without effect for constant."""
    clip: float = 1.0
    """Highest norm of the gradient of the mean loss per token; longer ones are scaled down. 0: no limit."""
    skip_spikes: float = 0.0
    """All ranks leave an update out whose loss or gradient norm is more than so many standard deviations above the mean
    of the last 128 steps, such as 6. 0: none."""
    on_divergence: Literal["stop", "rewind"] = "stop"
    """What follows ten updates in a row that were left out. rewind: the run goes back to the latest checkpoint from
    before them, and on without the samples since then."""

    def __post_init__(self) -> None:
        check("optim.lr", self.lr, self.lr > 0, "a number above 0")
        check("optim.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        check("optim.eps", self.eps, self.eps > 0, "a number above 0")
        check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        check("optim.warmup", self.warmup, self.warmup >= 0, "0 or more")
        check("optim.final_lr_fraction", self.final_lr_fraction, 0 <= self.final_lr_fraction <= 1, "from 0 to 1")
        check("optim.clip", self.clip, self.clip >= 0, "0 (no limit) or more")
        check("optim.skip_spikes", self.skip_spikes, self.skip_spikes >= 0, "0 (none) or more standard deviations")


@dataclass(frozen=True)
class LogConfig:
    """What is written down, and how often.

    Raises:
        UserError: A value is out of its range.
    """

    every: int = 50
    """Steps between two lines of figures."""
    validate_every: int = 500
    """Steps between two validations, each on a part of the held-out text; the weights are saved then too.
    0: only at the end."""
    validate_batches: int = 40
    """Global batches in a validation on the way, spread over the held-out text."""
    validate_batches_at_end: int = 0
    """Global batches in the validation at the end; as many as there are, at most. 0: a tenth of the steps trained, at
    least those of a validation on the way, which takes a small part of the training's time."""
    events_every: int = 500
    """Steps between two steps whose events go to events.jsonl. 0: none."""
    gradient_norms: bool = False
    """Also write the norm of each parameter's gradient on each rank, before and after it is reduced, to
    gradient_norms.jsonl, of the steps whose events are written; and, for small models, what norms of partial sums
    follow from to chunk_products.jsonl."""
    samples: bool = False
    """Also write the numbers of each step's samples, by rank, to samples.jsonl in the run's folder."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder (needs paceline[tensorboard])."""
    wandb: bool = False
    """Also log to Weights & Biases (needs paceline[wandb])."""

    def __post_init__(self) -> None:
        check("log.every", self.every, self.every >= 1, "at least 1 step")
        check("log.validate_every", self.validate_every, self.validate_every >= 0, "0 (at the end) or more steps")
        check("log.validate_batches", self.validate_batches, self.validate_batches >= 1, "at least 1 batch")
        at_end = self.validate_batches_at_end
        check("log.validate_batches_at_end", at_end, at_end >= 0, "0 (a tenth of the steps) or more batches")
        check("log.events_every", self.events_every, self.events_every >= 0, "0 (never) or more steps")
        if self.gradient_norms and not self.events_every:
            raise UserError(
                "log.gradient_norms: norms are written of the steps whose events are, and log.events_every is 0, so "
                "there are none: set it to 1 or more"
            )

    def batches_at_end(self, steps: int) -> int:
        """Global batches in the validation after a training of `steps`."""
        return self.validate_batches_at_end or max(self.validate_batches, steps // 10)


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run that stops goes on from, in the run's folder.

    Raises:
        UserError: A value is out of its range.
    """

    every: int | str = "10m"
    """Steps between two checkpoints, or time: 90s, 15m, 2h. 0: only at the end, and when the run is stopped."""
    keep: int = 2
    """How many of the latest stay."""
    keep_every: int = 0
    """Those of steps that this divides stay too. 0: none."""
    check_replicas: int = 0
    """Steps between two comparisons of what ranks should hold alike, to the bit (`pl.check_replicas`); where there are
    any, one is made before each checkpoint, too, so that none keeps a flipped bit. 0: none."""

    def __post_init__(self) -> None:
        good = self.every >= 0 if isinstance(self.every, int) else _TIME.fullmatch(self.every) is not None
        check("checkpoint.every", self.every, good, "steps such as 500, or a time such as 90s, 15m or 2h")
        check("checkpoint.keep", self.keep, self.keep >= 1, "at least 1")
        check("checkpoint.check_replicas", self.check_replicas, self.check_replicas >= 0, "0 (none) or more steps")
        check("checkpoint.keep_every", self.keep_every, self.keep_every >= 0, "0 (none) or more steps")

    @property
    def steps(self) -> int:
        """Steps between two checkpoints; 0 where that is a time, or never."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def seconds(self) -> float:
        """Seconds between two checkpoints; infinite where that is a number of steps, or never."""
        if isinstance(self.every, int):
            return math.inf
        return float(self.every[:-1]) * {"s": 1, "m": 60, "h": 3600}[self.every[-1]]


def check(name: str, value: object, good: bool, expected: str) -> None:
    """Raises a UserError that names a setting, what was expected and what came, unless it is good and finite."""
    if not good or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{name}: expected {expected}, got {repr(value) if isinstance(value, str) else value}")
