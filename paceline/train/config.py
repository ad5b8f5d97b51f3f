"""Everything a training run is made from, as frozen dataclasses that check themselves."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.data.config import DataConfig
from paceline.launch.cores import MOST_THREADS
from paceline.models.config import ModelConfig

AUTO = "auto"
"""What --resume is given to go on where there is something to go on from."""

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
        _check("optim.lr", self.lr, self.lr > 0, "a number above 0")
        _check("optim.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        _check("optim.eps", self.eps, self.eps > 0, "a number above 0")
        _check("optim.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("optim.warmup", self.warmup, self.warmup >= 0, "0 or more")
        _check("optim.final_lr_fraction", self.final_lr_fraction, 0 <= self.final_lr_fraction <= 1, "from 0 to 1")
        _check("optim.clip", self.clip, self.clip >= 0, "0 (no limit) or more")
        _check("optim.skip_spikes", self.skip_spikes, self.skip_spikes >= 0, "0 (none) or more standard deviations")


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
    samples: bool = False
    """Also write the numbers of each step's samples, by rank, to samples.jsonl in the run's folder."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's folder (needs paceline[tensorboard])."""
    wandb: bool = False
    """Also log to Weights & Biases (needs paceline[wandb])."""

    def __post_init__(self) -> None:
        _check("log.every", self.every, self.every >= 1, "at least 1 step")
        _check("log.validate_every", self.validate_every, self.validate_every >= 0, "0 (at the end) or more steps")
        _check("log.validate_batches", self.validate_batches, self.validate_batches >= 1, "at least 1 batch")
        at_end = self.validate_batches_at_end
        _check("log.validate_batches_at_end", at_end, at_end >= 0, "0 (a tenth of the steps) or more batches")
        _check("log.events_every", self.events_every, self.events_every >= 0, "0 (never) or more steps")

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
        _check("checkpoint.every", self.every, good, "steps such as 500, or a time such as 90s, 15m or 2h")
        _check("checkpoint.keep", self.keep, self.keep >= 1, "at least 1")
        _check("checkpoint.check_replicas", self.check_replicas, self.check_replicas >= 0, "0 (none) or more steps")
        _check("checkpoint.keep_every", self.keep_every, self.keep_every >= 0, "0 (none) or more steps")

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


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Raises:
        UserError: A value is out of its range, or two contradict each other.
    """

    model: ModelSection = field(default_factory=ModelSection)
    """The model's shape."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    strategy: Strategy = field(default_factory=lambda: Strategy(gradients="sum", precision="auto"))
    """How the ranks share the work."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written down."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What a run that stops goes on from."""
    steps: int = 2200
    """Optimizer steps."""
    batch: int = 8
    """Samples in one optimizer step over all ranks, each as long as the model's context."""
    micro_batch: int = 4
    """Samples that a rank computes at once; a larger share of the batch is accumulated."""
    tf32: bool = False
    """On GPUs with strategy.precision float32: multiply matrices in TF32, which is many times as fast and takes 10 bits
    of each factor's mantissa for 23."""
    seed: int = 0
    """Decides the initial weights and the order of the samples."""
    threads: int = 0
    """Threads per rank. 0: as OMP_NUM_THREADS says, else the cores that this process may use, shared out among the
    host's ranks."""
    workers: int | None = None
    """Worker processes to start on this host. Without it: join the job that torchrun or Slurm describes in the
    environment, else run in one process."""
    min_workers: int | None = None
    """Goes on with as few as these, on all hosts together, when workers are lost, and with all again when others have
    taken their places. Without it a lost worker ends the run, unless there are spares."""
    spares: int = 0
    """Processes on each host that wait to take the place of a lost worker at once."""
    timeout: float | None = None
    """Seconds after which a rank that is silent is given up. Without it: 600, and between steps 100 times the slowest
    so far, but at least 60."""
    folder: str | None = None
    """The run's folder, which must be new. Without it: runs/<date>-<time>-<preset>."""
    weights: str | None = None
    """A checkpoint whose weights a new run begins with: its folder, or a run's. Without it they are drawn."""
    resume: str | None = None
    """Goes on with a run that stopped: its folder, or one of its checkpoints. auto: with this command's latest run in
    runs/, or in the given folder, if that has not ended; else a new one begins."""

    def __post_init__(self) -> None:
        _check("steps", self.steps, 1 <= self.steps < 2**63, "at least 1 and less than 2**63")
        _check("batch", self.batch, self.batch >= 1, "at least 1 sample")
        _check("micro_batch", self.micro_batch, self.micro_batch >= 1, "at least 1 sample")
        _check("threads", self.threads, 0 <= self.threads <= MOST_THREADS, f"0 (share the cores out) to {MOST_THREADS}")
        _check("timeout", self.timeout, self.timeout is None or 1 <= self.timeout < 1e8, "1 to 1e8 seconds")
        _check("resume", self.resume, self.resume is None or bool(self.resume.strip()), "auto, a run or a checkpoint")
        _check("weights", self.weights, self.weights is None or bool(self.weights.strip()), "a run or a checkpoint")
        _check("folder", self.folder, self.folder is None or _is_name(self.folder), "a name, in UTF-8")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers: expected at least 1 worker process, got {self.workers}; leave it out for one")
        if self.strategy.gradients != "sum":
            raise UserError(
                "strategy.gradients: the trainer divides the sum over all ranks by the batch's tokens, so it must be "
                f"sum, got {self.strategy.gradients}"
            )
        _check("spares", self.spares, self.spares >= 0, "0 or more processes")
        if self.workers is not None and not self.replaces:
            check_ranks(self, self.workers)

    @property
    def replaces(self) -> bool:
        """Whether the run goes on when a worker is lost."""
        return self.min_workers is not None or self.spares > 0

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks can share the work."""
        try:
            check_ranks(self, ranks)
        except UserError:
            return False
        return True

    def multiplies_in(self, device: str) -> str:
        """What a kind of device multiplies matrices in: the strategy's precision, or tf32."""
        return (
            "tf32"
            if self.tf32 and self.strategy.precision == "float32" and device == "cuda"
            else self.strategy.precision
        )

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, the model's preset first, ready for YAML or JSON."""
        values: dict[str, Any] = _plain(asdict(self))
        model = values["model"]
        values["model"] = {"preset": model.pop("preset"), **model}
        return values


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """Checks that so many ranks can share the work, before anything is read or built.

    Raises:
        UserError: Fewer samples than ranks, or ranks that do not form the strategy's groups.
    """
    if config.batch < ranks:
        raise UserError(
            f"batch: {config.batch} samples cannot be shared by {ranks} ranks, each needs at least one; "
            f"use a batch of {ranks} or more, or at most {config.batch} ranks"
        )
    config.strategy.shards(ranks)


def _is_name(folder: str) -> bool:
    """Whether a folder can be called so: safetensors opens no file whose path is not UTF-8."""
    try:
        folder.encode()
    except UnicodeEncodeError:
        return False
    return bool(folder.strip())


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{name}: expected {expected}, got {repr(value) if isinstance(value, str) else value}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
