"""Adds up what happens between two log lines, on every rank, and reads it without holding the GPU up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import paceline as pl
from paceline.comm.read_later import ReadLater
from paceline.core.events import Event, exposed_fraction, exposed_in_step
from paceline.engine.engine import Engine
from paceline.launch.cores import waited_for_a_core
from paceline.train.gradient_norms import norm_lines, norms_of_rank, product_lines
from paceline.train.metrics import Interval, peak_memory
from paceline.train.run_folder import CHUNK_PRODUCTS, EVENTS, GRADIENT_NORMS
from paceline.train.slow_rank import SlowRank


class Meter:
    """Sums over the steps since the last reading."""

    def __init__(self, engine: Engine, steps: int, flops_per_token: int, peak_flops: float | None) -> None:
        """Starts the clock.

        Args:
            engine: Its events are drained here.
            steps: Length of the training in optimizer steps.
            flops_per_token: Operations of forward and backward.
            peak_flops: What one rank's device could do per second; None where that is not known.
        """
        self._engine, self._world, self._steps = engine, engine.world, steps
        self._flops_per_token = flops_per_token
        self._peak_flops = None if peak_flops is None else peak_flops * engine.world.world_size
        self._total_tokens = 0
        self._exposed = float("nan")
        self._slow_rank = SlowRank(engine.schedule)
        self._names = [slot.spec.name for slot in engine.layout.slots]
        self._copies = engine.schedule.holders
        self.restart()

    def restart(self) -> None:
        """Begins a new interval."""
        self._tokens_and_loss = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        self._wait = 0.0
        self._count = 0
        self._engine.drain_events()
        self._crowded = waited_for_a_core()
        self._began = time.perf_counter()

    def record(self, soon: bool, norms: bool) -> None:
        """A step begins.

        Args:
            soon: Whether the meter is read after this step or the next one. On a GPU only these are recorded, as the
                host has better things to do: what is exposed is told of the step before a reading.
            norms: Whether norms of its gradients are taken, by parameter.
        """
        if self._world.device.type != "cpu":
            self._engine.record_events(soon)
        self._engine.record_gradient_norms(norms)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside belongs to no step."""
        began, crowded = time.perf_counter(), waited_for_a_core()
        try:
            yield
        finally:
            self._began += time.perf_counter() - began
            self._crowded += waited_for_a_core() - crowded

    def add(self, counts: Tensor, used: Tensor, wait_seconds: float) -> None:
        """Takes one step.

        Args:
            counts: fp64 (2,): target tokens and summed loss over all ranks.
            used: 0-dim; false where the step was skipped, whose loss may not be a number.
            wait_seconds: How long this rank waited for its data.
        """
        self._tokens_and_loss += torch.where(used, counts, 0.0)
        self._wait += wait_seconds
        self._count += 1

    def read(
        self, step: int, norm: Tensor, learning_rate: float, skipped: int
    ) -> tuple[Interval, dict[str, list[dict[str, Any]]]]:
        """Ends the interval. A collective call.

        Args:
            step: Steps done.
            norm: Gradient norm of the last step, 0-dim.
            learning_rate: Of the last step.
            skipped: Steps left out so far.

        Returns:
            The interval's figures, the same on all ranks but for clocks, and what is known of its last step alone, as
            lines by the file that has them: every rank's events, and norms of its gradients, if they were taken.
        """
        tokens, loss = self._tokens_and_loss.tolist()
        seconds = time.perf_counter() - self._began
        events = self._engine.drain_events()
        rows = pl.all_gather_json(
            {
                "exposed": self._exposed_share(events, seconds),
                "wait": self._wait / self._count,
                "crowded": min(1.0, (waited_for_a_core() - self._crowded) / seconds),
                "peak": peak_memory(self._world.device),
                # The engine counts from 0 again in a run that goes on.
                "events": [event.to_dict() | {"step": step - 1} for event in _last_step(events)],
                "arrivals": self._slow_rank.account(events),
                "norms": norms_of_rank(self._engine),
            },
            "figures of the last steps",
        )
        self._total_tokens += int(tokens)
        interval = Interval(
            step=step,
            steps=self._steps,
            loss=loss / tokens if tokens else float("nan"),
            grad_norm=norm.item(),
            learning_rate=learning_rate,
            tokens_per_second=tokens / seconds,
            step_seconds=seconds / self._count,
            flops=self._flops_per_token * tokens / seconds,
            peak_flops=self._peak_flops,
            wait_seconds=max(row["wait"] for row in rows),
            exposed_fraction=sum(row["exposed"] for row in rows) / len(rows),
            crowded_fraction=max(row["crowded"] for row in rows),
            peak_bytes=max(row["peak"] for row in rows),
            tokens=self._total_tokens,
            skipped=skipped,
            slow_rank=self._slow_rank.found([row["arrivals"] for row in rows], seconds / self._count),
        )
        norms = [row["norms"] for row in rows]
        lines = {
            EVENTS: [event for row in rows for event in row["events"]],
            GRADIENT_NORMS: norm_lines(step, norms, self._names, self._copies),
            CHUNK_PRODUCTS: [],
        }
        if all(norms):
            lines[CHUNK_PRODUCTS] = product_lines(step, self._engine.chunk_products(), len(norms[0]["local"]))
        self.restart()
        return interval, lines

    def _exposed_share(self, events: list[Event], seconds: float) -> float:
        if self._world.device.type == "cpu":
            return exposed_fraction(events, seconds)
        # Where a stop was asked for, the step before it may not have been recorded.
        known = exposed_in_step(events, max((event.step for event in events), default=0))
        self._exposed = self._exposed if known is None else known
        return self._exposed


class Readback:
    """Values of a small tensor on the host; from a GPU those of the step before, so that it never waits.

    All ranks get the same values at the same step, so they may decide by them.
    """

    def __init__(self) -> None:
        self._step, self._later = 0, ReadLater()

    def exchange(self, step: int, values: Tensor) -> tuple[int, list[float]]:
        """Hands in this step's values; returns step and values of this one (CPU) or the last one (GPU).

        Args:
            step: Number of the step.
            values: 1-dim, always of one length. Before the first step they count as zeros.
        """
        if values.device.type == "cpu":
            return step, values.tolist()
        at, self._step = self._step, step
        earlier = self._later.exchange(values)
        return (step - 1, [0.0] * values.numel()) if earlier is None else (at, earlier.tolist())


def _last_step(events: list[Event]) -> list[Event]:
    """The events of the latest step among them."""
    latest = max((event.step for event in events), default=0)
    return [event for event in events if event.step == latest]
