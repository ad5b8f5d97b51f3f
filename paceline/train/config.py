"""Everything a training run is made from, as frozen dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.data.config import DataConfig
from paceline.launch.cores import MOST_THREADS
from paceline.train.sections import CheckpointConfig, LogConfig, ModelSection, OptimConfig, check

AUTO = "auto"
"""What --resume is given to go on where there is something to go on from."""


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
    plan: Literal["", "auto"] = ""
    """auto: a new run takes the strategy and the micro-batch that the planner finds the fastest within memory, for this
    machine, which it measures first if nobody has. Without it, those that are set."""
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
        check("steps", self.steps, 1 <= self.steps < 2**63, "at least 1 and less than 2**63")
        check("batch", self.batch, self.batch >= 1, "at least 1 sample")
        check("micro_batch", self.micro_batch, self.micro_batch >= 1, "at least 1 sample")
        check("threads", self.threads, 0 <= self.threads <= MOST_THREADS, f"0 (share the cores out) to {MOST_THREADS}")
        check("timeout", self.timeout, self.timeout is None or 1 <= self.timeout < 1e8, "1 to 1e8 seconds")
        check("resume", self.resume, self.resume is None or bool(self.resume.strip()), "auto, a run or a checkpoint")
        check("weights", self.weights, self.weights is None or bool(self.weights.strip()), "a run or a checkpoint")
        check("folder", self.folder, self.folder is None or _is_name(self.folder), "a name, in UTF-8")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers: expected at least 1 worker process, got {self.workers}; leave it out for one")
        if self.strategy.gradients != "sum":
            raise UserError(
                "strategy.gradients: the trainer divides the sum over all ranks by the batch's tokens, so it must be "
                f"sum, got {self.strategy.gradients}"
            )
        check("spares", self.spares, self.spares >= 0, "0 or more processes")
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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value
