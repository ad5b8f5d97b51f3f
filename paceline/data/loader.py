"""Batches of one rank, prepared in the background so that a step does not wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.data.corpus import TokenFile
from paceline.data.samples import (
    IGNORED_TARGET,
    LeftOut,
    batch_number,
    gather,
    global_batch,
    sample_count,
    share,
    validation_share,
)

STEPS_AHEAD = 2


class MicroBatch(NamedTuple):
    """What one forward and backward pass takes.

    Attributes:
        inputs: token ids, int64, shape (b, context), b at least 1.
        targets: the next token of each, int64, shape (b, context), -100 where there is none.
        tokens: number of targets that are not -100; 0 for the stand-in of an empty micro-batch.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    tokens: int


StepBatch = list[MicroBatch]


class Loader:
    """An endless iterator over optimizer steps; each item is this rank's micro-batches of one step.

    What a step holds depends on (seed, step) and what is left out alone; ranks share it out. A background thread
    prepares two steps ahead. Close it, or use it in a `with` block, so that the thread ends.

    Attributes:
        samples: samples in an epoch.
        left_out: global batches that no step takes.
        given: samples of the last `next()`, by micro-batch.
        wait_seconds: how long the last `next()` waited for its batch, in seconds.
    """

    def __init__(
        self,
        token_file: TokenFile,
        *,
        context: int,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        first_step: int = 0,
        left_out: LeftOut = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Check the sizes and start preparing.

        Args:
            token_file: tokens to train on.
            context: tokens in a sample.
            batch_size: samples in an optimizer step, summed over ranks.
            micro_batch: most samples in a forward pass.
            rank: this rank.
            world_size: number of ranks.
            seed: fixes the order of samples.
            first_step: the step to begin with, to go on where a run stopped.
            left_out: global batches that no step takes.
            device: where tensors are wanted; copies to CUDA overlap with computing.

        Raises:
            UserError: the text is shorter than one context, or the ranks cannot share the batch.
        """
        if len(token_file) < context + 1:
            raise UserError(
                f"the training text has {len(token_file)} tokens, but one sample needs {context + 1} "
                f"(the context of {context} and the token after it). Use more text or a shorter context"
            )
        if micro_batch < 1:
            raise UserError(f"the micro-batch is {micro_batch}, but holds at least 1 sample")
        share(np.arange(batch_size), rank, world_size, micro_batch)  # raises here rather than in the thread
        self.samples = sample_count(len(token_file), context)
        self.wait_seconds = 0.0
        self._token_file, self._context = token_file, context
        self._seed, self._batch_size = seed, batch_size
        self._rank, self._world_size, self._micro_batch = rank, world_size, micro_batch
        self._device = torch.device(device)
        if self._device == torch.device("cuda"):  # without an index, which the thread needs
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._start(first_step, left_out)

    def go_to(self, step: int, left_out: LeftOut) -> None:
        """Begin again with a step, counted from 0, and with other batches left out."""
        self.close()
        self._start(step, left_out)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Samples of a step, counted from 0, over all ranks: shape (batch size,)."""
        return global_batch(self._seed, batch_number(step, self.left_out), self._batch_size, self.samples)

    def shares(self, step: int) -> list[list[list[int]]]:
        """Samples of a step, counted from 0, by rank and micro-batch."""
        batch, sizes = self.batch(step), (self._world_size, self._micro_batch)
        return [[part.tolist() for part in share(batch, rank, *sizes)] for rank in range(self._world_size)]

    def _start(self, step: int, left_out: LeftOut) -> None:
        self.left_out = left_out
        self.given: list[list[int]] = []
        self._ready: queue.Queue[tuple[list[list[int]], StepBatch] | BaseException] = queue.Queue(STEPS_AHEAD)
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._prepare, args=(step,), name="loader", daemon=True)
        self._thread.start()

    def _prepare(self, step: int) -> None:
        pin = self._device.type == "cuda"
        try:
            if pin:  # a new thread begins on device 0: pinning there would open a second context
                torch.cuda.set_device(self._device)
            while not self._closed.is_set():
                parts = share(self.batch(step), self._rank, self._world_size, self._micro_batch)
                batches = [_micro_batch(self._token_file, part, self._context, pin) for part in parts]
                self._ready.put(([part.tolist() for part in parts], batches))
                step += 1
        except BaseException as error:
            # Raised in the thread that waits for batches.
            self._ready.put(error)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        """The next step's micro-batches on the device; raises what the thread raised."""
        if self._error is not None:
            raise self._error
        if self._closed.is_set():
            raise RuntimeError("the loader is closed")
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_seconds = time.perf_counter() - began
        if isinstance(item, BaseException):
            self._error = item
            raise item
        self.given, batches = item
        return [_to(batch, self._device) for batch in batches]

    def close(self) -> None:
        """End the background thread; safe to call twice."""
        self._closed.set()
        while self._thread.is_alive():
            try:  # the thread may stand in `put`: make room
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def validation_batches(
    token_file: TokenFile,
    *,
    context: int,
    micro_batch: int,
    samples: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[MicroBatch]:
    """This rank's part of the samples, in order; over all ranks each of them comes exactly once.

    Ranks get equally many micro-batches, as sharded parameters are gathered by all; a last one may have no targets.

    Args:
        token_file: held-out tokens.
        context: tokens in a sample.
        micro_batch: most samples in a micro-batch.
        samples: how many to take, evenly spread over the text, at most as many as there are; None for all.
        rank: this rank.
        world_size: number of ranks.
        device: where tensors are wanted.
    """
    there_are = sample_count(len(token_file), context)
    samples = there_are if samples is None else samples
    mine = validation_share(samples, rank, world_size)
    most = max(len(validation_share(samples, other, world_size)) for other in range(world_size))
    for start in range(0, most, micro_batch):
        indices = np.array(mine[start : start + micro_batch], np.int64) * there_are // samples
        yield _to(_micro_batch(token_file, indices, context, pin=False), torch.device(device))


def _micro_batch(token_file: TokenFile, indices: NDArray[np.int64], context: int, pin: bool) -> MicroBatch:
    """The samples at `indices`; one sample without targets if there are none."""
    for index in indices.tolist():
        token_file.check(index * context, (index + 1) * context + 1)
    inputs, targets = gather(token_file.tokens, indices, context)
    if len(indices) == 0:
        inputs = np.zeros((1, context), np.int64)
        targets = np.full((1, context), IGNORED_TARGET, np.int64)
    tokens = int(np.count_nonzero(targets != IGNORED_TARGET))
    tensors = torch.from_numpy(inputs), torch.from_numpy(targets)
    if pin:
        tensors = tensors[0].pin_memory(), tensors[1].pin_memory()
    return MicroBatch(*tensors, tokens)


def _to(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """A copy on `device`, not waited for where the memory is pinned; the batch itself on the CPU."""
    if device.type == "cpu":
        return batch
    return MicroBatch(
        batch.inputs.to(device, non_blocking=True), batch.targets.to(device, non_blocking=True), batch.tokens
    )
