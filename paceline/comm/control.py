"""Control messages: small values that every rank tells all others, each with what it is about.

They go through Gloo's process group, where the n-th message of one rank meets the n-th of every other, whatever they
are about. So each carries a label and its generation, which `new_generation` counts on: ranks whose messages differ in
either are told so, instead of taking one value for another. Gloo does not know who speaks: each message is signed with
the job's secret.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import whereabouts
from paceline.comm.authentication import TAG, is_signed, sign
from paceline.comm.cpu.registry import find_deadlock
from paceline.comm.group_work import LOOK_SECONDS, group_kept_after, is_done, lost, started
from paceline.comm.patience import Silence, limit
from paceline.comm.transport import CommunicationError, DisagreementError
from paceline.comm.watch import missing
from paceline.comm.world import World, current_world

_LENGTHS = struct.Struct("<QQ")
"""Bytes of the subject and of the value that follow it, and the tag."""
_MOST_BYTES = 64 << 20
"""Of a message: more is no control message."""
_AT_FIRST = 1024
"""Bytes of a message that are gathered before its length is known; most messages end there."""
_LABEL = 200
"""Characters of a label that others are told, and of a cause."""


class _Subject(NamedTuple):
    """What a control message is about."""

    generation: int
    label: str
    cause: str
    """What led to it, on this rank: others need not have the same."""

    @property
    def meets(self) -> tuple[int, str]:
        """What ranks have alike whose messages are about the same."""
        return self.generation, self.label

    def __str__(self) -> str:
        return f"{self.label}, after {self.cause}" if self.cause else self.label


@dataclass
class _Sent:
    """A message that this rank sent, and what arrives from the others."""

    message: bytes
    rows: list[Tensor]
    work: dist.Work


class _Control:
    """The control messages of one job.

    Attributes:
        world: The job.
        generation: Of the messages that are sent now.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.generation = 0
        self._left: _Sent | None = None
        """What this rank gave up waiting for; the others' next message still meets it."""

    def exchange(
        self, label: str, value: Any, cause: str = "", frees: bool = False
    ) -> tuple[list[_Subject], list[Any]]:
        """Every rank's subject and, where all are about the same, its value, in rank order.

        Args:
            label: What it is about.
            value: What this rank tells.
            cause: What led to it.
            frees: Whether ranks that wait for this one in a collective are told that it will not come, and then waited
                for; by default this rank gives up as well.
        """
        about = _Subject(self.generation, label[:_LABEL], "".join(filter(str.isprintable, cause))[:_LABEL])
        # Characters as they are: all have to fit into what is gathered first.
        subject = json.dumps(about, ensure_ascii=False).encode(errors="replace")
        text = json.dumps(value).encode()
        said = _LENGTHS.pack(len(subject), len(text)) + subject + text
        message = said + sign(self.world.secret, *_signed(self.world.rank, said))
        rows = self._gather(message, _AT_FIRST, about, frees)
        lengths = [_LENGTHS.unpack_from(row) for row in rows]
        start = _LENGTHS.size
        for rank, length in enumerate(map(sum, lengths)):
            if length > _MOST_BYTES:
                # All ranks see it, and none goes on to gather it.
                raise CommunicationError(
                    f"{label}: rank {rank} tells {length} bytes; at most {_MOST_BYTES} are a control message. Send "
                    "tensors by torch.distributed, or write a file"
                )
        subjects = [
            _Subject(*json.loads(row[start : start + length])) for row, (length, _) in zip(rows, lengths, strict=True)
        ]
        if len({each.meets for each in subjects}) > 1:
            return subjects, []
        longest = start + max(map(sum, lengths)) + TAG
        if longest > _AT_FIRST:
            rows = self._gather(message, longest, about, frees)
        for rank, (row, length) in enumerate(zip(rows, map(sum, lengths), strict=True)):
            end = start + length
            if not is_signed(row[end : end + TAG], self.world.secret, *_signed(rank, row[:end])):
                raise CommunicationError(f"{label}: what came for rank {rank}'s message was not signed by this job")
        values = [(row[start + head :], size) for row, (head, size) in zip(rows, lengths, strict=True)]
        return subjects, [json.loads(row[:size]) for row, size in values]

    def _gather(self, message: bytes, size: int, about: _Subject, frees: bool) -> list[bytes]:
        """The first `size` bytes of every rank's message, filled up with zeros."""
        padded = message[:size].ljust(size, b"\0")
        sent, self._left = self._left, None
        if sent is None or sent.message != padded:
            own = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
            rows = [torch.empty_like(own) for _ in range(self.world.world_size)]
            whereabouts.messages += 1
            sent = _Sent(padded, rows, started(lambda: dist.all_gather(rows, own, async_op=True), about.label))
        whereabouts.message = about.label
        try:
            self._wait(sent, about, frees)
        finally:
            whereabouts.message = ""
        return [row.numpy().tobytes() for row in sent.rows]

    def _wait(self, sent: _Sent, about: _Subject, frees: bool) -> None:
        suspicion, silence = "", Silence(self.world.timeout)
        with group_kept_after(sent.work):
            while not self._arrived(sent, about.label, silence):
                found = find_deadlock(f"rank {self.world.rank} waits in {about}")
                if found is not None and found.reason == suspicion:
                    # It was the same a while ago, and nothing of this rank is under way that could change it.
                    found.transport.abort(suspicion)
                    if not frees:
                        self._left = sent
                        raise DisagreementError(suspicion)
                suspicion = found.reason if found is not None else ""
                if silence.left() <= 0:
                    raise self._silent(about.label)

    def _arrived(self, sent: _Sent, label: str, silence: Silence) -> bool:
        """Waits a while; whether everything has arrived."""
        try:
            return is_done(sent.work)
        except RuntimeError as error:
            # What Gloo says is about its sockets. It has the same time limit.
            raise self._silent(label) if silence.left() <= LOOK_SECONDS else lost(label) from error

    def _silent(self, label: str) -> CommunicationError:
        within = f" within {limit(self.world.timeout):g} s"
        ranks = range(self.world.world_size)
        return lost(label, within, missing(whereabouts.MESSAGES, whereabouts.messages, ranks))


_control: _Control | None = None


def _current() -> _Control:
    global _control
    world = current_world()
    if _control is None or _control.world is not world:
        _control = _Control(world)
    return _control


def all_gather_json(value: Any, label: str = "all_gather_json") -> list[Any]:
    """Every rank's JSON-ready `value`, in rank order. For small control data; JSON, so nothing is executed.

    Args:
        value: What this rank tells the others: numbers, text, lists, dictionaries. Not tensors: `loss.item()`.
        label: What it is about, in words: the same on every rank.

    Returns:
        A list of as many values as there are ranks, the same on every rank.

    Raises:
        CommunicationError: Other ranks exchange something else, or are gone; says who does what.
        TypeError: JSON cannot say the value.

    Example:
        >>> losses = pl.all_gather_json({"loss": 0.25, "samples": 8}, "validation")
        >>> sum(one["loss"] for one in losses) / len(losses)
        0.25
    """
    control = _current()
    if control.world.world_size == 1:
        return [value]
    subjects, values = control.exchange(label, value)
    if not values:
        raise CommunicationError(_disagreement(subjects))
    return values


def barrier() -> None:
    """Returns when every rank has called it, as before reading a file that rank 0 writes.

    Raises:
        CommunicationError: Other ranks exchange something else, or are gone; says who does what.

    Example:
        >>> if pl.init().rank == 0:
        ...     torch.save({"step": 100}, "progress.pt")
        >>> pl.barrier()
        >>> torch.load("progress.pt")
        {'step': 100}
    """
    all_gather_json(None, "pl.barrier")


def broadcast(buffer: Tensor, source: int, label: str) -> None:
    """Fills a buffer with what one rank has in its own. A collective call, for what is no step's.

    Args:
        buffer: On the CPU, of the same size and dtype on every rank.
        source: The rank whose elements all get.
        label: What it is about, in words.

    Raises:
        CommunicationError: A rank is gone, or exchanges something else.
    """
    world = current_world()
    if world.world_size == 1:
        return
    all_gather_json(None, label)
    work, silence = started(lambda: dist.broadcast(buffer, source, async_op=True), label), Silence(world.timeout)
    with group_kept_after(work):
        try:
            while not is_done(work):
                if silence.left() <= 0:
                    raise lost(label, f" within {limit(world.timeout):g} s")
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise lost(label) from error


def new_generation(label: str = "pl.reset", cause: str = "") -> None:
    """Leaves behind the control messages of a step that failed. A collective call.

    Until every rank has come, those who still exchange messages of an older generation are told that others are here,
    and their messages are not taken for answers to anything. So are those who wait for this rank in a collective, which
    may be another model's than the one that failed here.

    Args:
        label: What leaves them behind.
        cause: What failed here, in words.

    Raises:
        CommunicationError: A rank is gone.
    """
    control = _current()
    if control.world.world_size == 1:
        return
    while True:
        subjects, _ = control.exchange(label, None, cause, frees=True)
        if all(subject.label == label[:_LABEL] for subject in subjects):
            # Where some began one that failed, they are further than others.
            control.generation = 1 + max(subject.generation for subject in subjects)
            return


def _disagreement(subjects: Sequence[_Subject]) -> str:
    """Who exchanges what, and what to do."""
    several = len({subject.generation for subject in subjects}) > 1
    sides = [
        f"rank {', '.join(str(rank) for rank, other in enumerate(subjects) if other == subject)}: {subject}"
        + (f" (after {subject.generation} resets)" if several else "")
        for subject in dict.fromkeys(subjects)
    ]
    return (
        f"ranks disagree on what to exchange; {'; '.join(sides)}. Every rank must make the same calls in the same "
        "order; where a step failed on some ranks, call pl.reset(model) on all of them"
    )


def _signed(rank: int, said: bytes) -> tuple[bytes, ...]:
    """What a message's tag is of: who says it, and all of it."""
    return b"control message", str(rank).encode(), said
