"""Figures of a run: measured over the steps between two log lines, printed, written down, sent to trackers."""

from __future__ import annotations

import importlib.util
import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.core.errors import UserError
from paceline.core.straggler import Costly
from paceline.train.run_folder import METRICS, RunFolder
from paceline.train.sections import LogConfig

TENSORBOARD = "tensorboard"


class Tracker(Protocol):
    """Where figures go: `wandb.Run` has this shape."""

    def log(self, figures: dict[str, Any], step: int) -> None:
        """Takes the figures of one step, by `group/name`."""
        ...

    def finish(self) -> None:
        """No more figures follow."""
        ...


class JsonLines:
    """metrics.jsonl in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        """Appends to the folder's file."""
        self._folder = folder

    def log(self, figures: dict[str, Any], step: int) -> None:
        """See `Tracker`. A figure that is not a number is written as null, as JSON has no NaN."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in figures.items()
        }
        self._folder.append(METRICS, [{"step": step, "time": time.time(), **finite}])

    def finish(self) -> None:
        """See `Tracker`."""


class TensorBoard:
    """TensorBoard's event files in the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        """Writes into `tensorboard` in the folder; needs that package."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer: Any = SummaryWriter(str(folder.path / TENSORBOARD))

    def log(self, figures: dict[str, Any], step: int) -> None:
        """See `Tracker`."""
        self._folder.write(TENSORBOARD, lambda _: [self._writer.add_scalar(*item, step) for item in figures.items()])

    def finish(self) -> None:
        """See `Tracker`."""
        self._folder.write(TENSORBOARD, lambda _: self._writer.close())


def check_trackers(config: LogConfig) -> None:
    """Checks before any work that the trackers which the configuration asks for are there.

    Raises:
        UserError: A package that one needs is missing.
    """
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted and importlib.util.find_spec(package) is None:
            raise UserError(f"log.{package} needs a package: pip install 'paceline[{package}]'")


def open_trackers(config: LogConfig, folder: RunFolder, run_config: Mapping[str, Any]) -> list[Tracker]:
    """metrics.jsonl, always, and those that the configuration asks for."""
    trackers: list[Tracker] = [JsonLines(folder)]
    if config.tensorboard:
        trackers.append(TensorBoard(folder))
    if config.wandb:
        import wandb

        trackers.append(
            wandb.init(project="paceline", name=folder.path.name, dir=str(folder.path), config=dict(run_config))
        )
    return trackers


@dataclass(frozen=True)
class Interval:
    """What was measured over the steps since the last log line."""

    step: int
    """Steps done."""
    steps: int
    """Steps that the run will do."""
    loss: float
    """Mean over the interval's tokens, nats per token."""
    grad_norm: float
    """Of the gradient of the mean loss per token in the last step, before clipping."""
    learning_rate: float
    """Of the last step."""
    tokens_per_second: float
    """Target tokens of all ranks together."""
    step_seconds: float
    """Mean wall time of a step."""
    flops: float
    """Floating-point operations of the model per second, all ranks together."""
    peak_flops: float | None
    """What the hardware of all ranks could do per second; None where that is not known."""
    wait_seconds: float
    """Mean time of a step in which the slowest rank waited for its data."""
    exposed_fraction: float
    """Share of the time in which ranks stood still for communication, mean over ranks."""
    crowded_fraction: float
    """Share of the time in which other work had the cores that a rank's main thread could have run on, at most."""
    peak_bytes: int
    """Most memory that a rank has held so far."""
    tokens: int
    """Target tokens trained on so far."""
    skipped: int
    """Steps left out so far because the gradient was not finite."""
    slow_rank: Costly | None = None
    """The rank that the others stand still for, if one stands out."""

    def figures(self) -> dict[str, float | int]:
        """The figures by `group/name`."""
        figures: dict[str, float | int] = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/learning_rate": self.learning_rate,
            "train/tokens": self.tokens,
            "train/skipped_steps": self.skipped,
            "memory/peak_bytes": self.peak_bytes,
            "perf/tokens_per_second": self.tokens_per_second,
            "perf/step_seconds": self.step_seconds,
            "perf/tflops": self.flops / 1e12,
            "data/wait_seconds": self.wait_seconds,
            "comm/exposed_fraction": self.exposed_fraction,
            "perf/crowded_fraction": self.crowded_fraction,
        }
        if self.peak_flops:
            figures["perf/mfu"] = self.flops / self.peak_flops
        if self.slow_rank is not None:
            figures |= {"comm/slow_rank": self.slow_rank.rank, "comm/slow_rank_seconds": self.slow_rank.cost}
        return figures

    def line(self, columns: int | None = None) -> str:
        """The figures for the screen.

        Args:
            columns: How many there are; what matters least is left out where they are too few. None: all figures.
        """
        width = len(str(self.steps))
        fields = {
            "step": f"step {self.step:>{width}}/{self.steps}",
            "loss": f"loss {self.loss:7.4f}",
            "grad_norm": f"grad_norm {self.grad_norm:6.3f}",
            "lr": f"lr {self.learning_rate:.2e}",
            "memory": f"memory {self.peak_bytes / 2**30:.2f} GiB",
            "tokens": f"tokens/s {self.tokens_per_second:,.0f} (global)",
            "flops": f"TFLOP/s {self.flops / 1e12:.3g}",
            "mfu": f"MFU {100 * self.flops / self.peak_flops:.1f} %" if self.peak_flops else "",
            "exposed": f"comm exposed {100 * self.exposed_fraction:.1f} %",
            "slow": self._slow_rank() if self.slow_rank is not None else "",
            # The first step warms up: it tells nothing about the others.
            "eta": f"ETA {duration((self.steps - self.step) * self.step_seconds)}" if self.step > 1 else "",
        }
        fields = {name: text for name, text in fields.items() if text}
        for name in ("flops", "memory", "lr", "grad_norm", "mfu"):
            if columns is not None and len("  ".join(fields.values())) > columns:
                fields.pop(name, None)
        return "  ".join(fields.values())

    def _slow_rank(self) -> str:
        assert self.slow_rank is not None
        rank, _, cost = self.slow_rank
        return f"slow: rank {rank} costs the others {1e3 * cost:.3g} ms a step ({100 * cost / self.step_seconds:.0f} %)"


def duration(seconds: float) -> str:
    """Seconds for people: 95 -> '1:35', 7384 -> '2:03:04'."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held: of the GPU's memory as torch's allocator counts it, else resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # Linux reports kilobytes, macOS bytes (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
