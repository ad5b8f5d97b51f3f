"""Where a training loop is in its step, and which calls would be wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class EngineError(RuntimeError):
    """The training loop did something that would give wrong gradients or let replicas drift apart."""


class Progress:
    """Counts steps and micro-batches from what the loop is seen to do.

    A step is over after a synchronised backward or an update; the next forward or backward begins a new one.

    Attributes:
        step: Number of the current step, from 0: of synchronised backwards, which a loop has one of per update.
        micro_batch: Number of the micro-batch under way within the step, or of the next one.
        last_micro_batch: Number of the latest one whose backward is complete.
        phase: What is under way.
        synchronises: Whether the backward under way, or the latest one, reduces gradients.
        generation: How many updates the weights have had.
        reduced: Whether the current step has had its synchronised backward.
    """

    def __init__(self, world_size: int) -> None:
        """Starts before the first step of a job of `world_size` ranks."""
        self.step = self.micro_batch = self.last_micro_batch = self.generation = 0
        self.phase: Literal["idle", "forward", "backward"] = "idle"
        self.synchronises = True
        self.reduced = False
        self._world_size = world_size
        self._step_over = False
        self._deferrals = 0

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes that begin inside do not reduce gradients."""
        self._deferrals += 1
        try:
            yield
        finally:
            self._deferrals = max(0, self._deferrals - 1)

    def begin_forward(self) -> bool:
        """A forward begins; returns whether it is the first of a micro-batch.

        Raises:
            EngineError: The last backward did not finish.
        """
        self._require_whole_backward("forward")
        if self.phase == "forward":
            return False
        self._begin_step_if_over()
        self.phase = "forward"
        return True

    def begin_backward(self) -> None:
        """A backward begins."""
        self._begin_step_if_over()
        self.phase = "backward"
        self.synchronises = self._deferrals == 0

    def end_backward(self) -> None:
        """The backward is complete, its gradients reduced if they were to be."""
        self.last_micro_batch = self.micro_batch
        self.micro_batch += 1
        self.phase = "idle"
        self._step_over = self.reduced = self.synchronises

    def end_update(self) -> None:
        """An optimizer has changed the weights."""
        self.generation += 1
        self._step_over = True

    def reset(self) -> None:
        """The step under way is given up."""
        self.phase, self.micro_batch, self._deferrals = "idle", 0, 0
        self._step_over = self.reduced = False

    def require_current(self, generation: int) -> None:
        """Refuses a backward through weights that have since changed.

        Raises:
            EngineError: The forward used another generation of the weights.
        """
        if generation != self.generation:
            raise EngineError(
                "the optimizer stepped between this forward and its backward, so the gradients would belong to "
                "weights that no longer exist: call backward before optimizer.step(), or run the forward again. "
                "Networks with an optimizer each (a GAN's) are parallelized one by one"
            )

    def require_reduced(self, what: str) -> None:
        """Refuses to use gradients that are partial or this rank's own.

        Raises:
            EngineError: They are.
        """
        self._require_whole_backward(what)
        if self._world_size > 1 and self.micro_batch and not self._step_over:
            raise EngineError(
                f"{what} after a backward under no_sync: the gradients are this rank's own and replicas would drift "
                "apart. Run the step's last micro-batch outside no_sync (pl.accumulate does), or call pl.reset(model)"
            )

    def _require_whole_backward(self, what: str) -> None:
        if self.phase == "backward":
            raise EngineError(
                f"{what} after a backward that did not finish: its gradients are partial. After an exception in "
                "backward call pl.reset(model) on every rank, then go on with the next batch"
            )

    def _begin_step_if_over(self) -> None:
        if self._step_over:
            self.step += 1
            self.micro_batch = 0
            self._step_over = self.reduced = False
