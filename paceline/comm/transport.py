"""What the engine asks of a transport."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError


class CommunicationError(RuntimeError):
    """A collective failed: a peer vanished, stopped answering, or called something else.

    The message says which rank does what. Where all ranks still run, `pl.reset(model)` on every rank opens the
    connections anew; where one is gone, the job is to be started again.
    """


class SilenceError(CommunicationError):
    """A peer did not answer within the time limit."""


class DisagreementError(CommunicationError, EngineError):
    """Ranks of one group are about to communicate different things: their training loops differ."""


Exchange = Callable[[Any, str], list[Any]]
"""Gathers one JSON-ready value from every rank of the job, in rank order; the text says what it is about."""

_PASSED_ON = re.compile(r"rank \d+ gave up: ")


def aborted_by(peer: int, reason: str) -> CommunicationError:
    """What a rank raises whose peer aborted.

    A reason that the peer itself was told stays as it is, so that the first one's stands last on every rank.
    """
    return CommunicationError(reason if _PASSED_ON.match(reason) else f"rank {peer} gave up: {reason}")


def is_of_another(error: CommunicationError) -> bool:
    """Whether its cause is an exception on another rank, and not that ranks did not meet."""
    told = _PASSED_ON.match(str(error))
    # What says that ranks did not meet begins with the rank; exceptions begin with their type.
    return told is not None and not str(error)[told.end() :].startswith("rank")


def explain(error: BaseException) -> str:
    """An error in words, as ranks tell each other why they failed."""
    if isinstance(error, CommunicationError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Transport(Protocol):
    """Moves flat buffers between the ranks of one group, one collective at a time."""

    name: str

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that `run` moves without staging. A collective call: every rank makes it."""
        ...

    def allocate_shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer that is the same memory on every rank. A collective call.

        Raises:
            UserError: These ranks cannot share memory.
        """
        ...

    def run(
        self,
        collective: str,
        buffer: Tensor,
        label: str,
        scale: float = 1.0,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> Traffic:
        """Runs one collective in place and returns when this rank's part is complete.

        Args:
            collective: Name of a collective, or with an algorithm of it: see `algorithms.find_algorithm`.
            buffer: Contiguous, one dimension, the same size and dtype on every rank.
            label: Names the op in errors.
            scale: Factor for sums, applied once to the finished sum.
            shard: This rank's shard, of size `buffer.numel() / ranks`, where it does not lie in the buffer: what
                all_gather sends (from `allocate`, of the buffer's dtype), what reduce_scatter fills (of any float
                dtype; the sum is rounded to it once). The buffer of a reduce_scatter is from `allocate`.
            once: Whether the buffer is given up afterwards, so that nothing of the call should be kept for the next.

        Returns:
            Bytes that this rank sent and received.

        Raises:
            CommunicationError: A peer vanished, timed out or called something else.
        """
        ...

    def inherit(self, other: Transport) -> None:
        """Takes over the buffers that a transport between the same ranks, which is closed, allocated."""
        ...

    def saved_residuals(self) -> list[tuple[Any, Tensor]]:
        """What rounding took off the messages sent so far, which is added to the next: by message."""
        ...

    def load_residuals(self, saved: list[tuple[Any, Tensor]]) -> None:
        """Goes on with what `saved_residuals` returned, in whatever job of the same ranks; [] as anew."""
        ...

    def abort(self, reason: str = "") -> None:
        """Ends all waiting for peers in `run`, where that can be done; nothing can be run any more.

        Args:
            reason: What failed first, which a thread of this rank that waits in `run` and all peers then raise.
        """
        ...

    def close(self) -> None:
        """Releases connections. Buffers stay valid for this rank."""
        ...
