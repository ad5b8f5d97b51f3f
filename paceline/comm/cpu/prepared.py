"""A collective made ready to run on one buffer: what to wait for, what to move, what to add, round by round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.cpu.signals import text_of
from paceline.comm.cpu.sums import Kernel
from paceline.comm.cpu.tcp import Message
from paceline.core.collectives.rounds import Traffic

Stage = tuple[int, int]
"""(peer, how far it must have come in the collective)"""


@dataclass(slots=True)
class PreparedRound:
    """One round of this rank.

    Ranks of the same host read each other's buffers where they lie: a rank that comes to stage `start` has there what
    it has for the round, and one that comes to `end` has read what it needs. Ranks of other hosts are sent messages.
    """

    start: int
    publishes_start: bool
    wait_before: tuple[Stage, ...]
    """Who still reads what this round overwrites, until when."""
    sources: tuple[int, ...]
    """Ranks of this host whose buffers it reads."""
    kernels: list[Kernel]
    """What reads, adds and writes."""
    encode: list[Kernel] = field(default_factory=list)
    """What puts messages together."""
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    write_back: list[Kernel] = field(default_factory=list)
    """What overwrites what peers read in this very round."""
    readers: tuple[int, ...] = ()
    """Ranks of this host that read this rank's buffer."""
    publishes_end: bool = False
    """Whether someone may wait for this rank's reading, and nothing else tells that it is over."""

    @property
    def end(self) -> int:
        """The stage of having read."""
        return self.start + 1


@dataclass(slots=True)
class PreparedCollective:
    """One collective on one buffer."""

    digest: int
    """The same number on every rank that runs the same collective."""
    text: bytes
    """What is run, for people."""
    rounds: list[PreparedRound]
    wait_after: tuple[Stage, ...]
    """Who may still read this rank's buffer, until when."""
    traffic: Traffic
    fill: Kernel | None = None
    """What puts this rank's elements into the buffer."""


def name_collective(name: str, label: str, buffer: Tensor, more: str = "") -> tuple[bytes, int]:
    """A collective in words, and their digest: what ranks compare."""
    words = f"{name} {label} {buffer.numel()} {str(buffer.dtype).removeprefix('torch.')}{more}"
    return text_of(words), int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")


def prepare_direct_gather(
    name: str, label: str, rank: int, buffer: Tensor, shards: Mapping[int, Tensor]
) -> PreparedCollective:
    """Makes an out-of-place all-gather ready, in which ranks of one host read each other's shards.

    Args:
        name: The collective, with its algorithm.
        label: Names the op in errors.
        rank: This rank.
        buffer: Is filled; in any memory, of `len(shards)` times a shard's elements.
        shards: Each rank's shard, this one's included.
    """
    peers = tuple(peer for peer in shards if peer != rank)
    size = buffer.numel() // len(shards)
    kernels = [copy_kernel(buffer[peer * size : (peer + 1) * size], shards[peer]) for peer in (*peers, rank)]
    text, digest = name_collective(name, label, buffer)
    only = PreparedRound(1, True, (), peers, kernels, publishes_end=True)
    traffic = Traffic(len(peers) * size * buffer.itemsize, len(peers) * size * buffer.itemsize)
    return PreparedCollective(digest, text, [only], tuple((peer, only.end) for peer in peers), traffic)


def prepare_handshake(
    name: str, label: str, rank: int, buffer: Tensor, local: Iterable[int], remote: Iterable[int]
) -> PreparedCollective:
    """A collective that moves nothing, in which ranks see that all are about to run the same one.

    Args:
        name: The collective to come, with its algorithm.
        label: Names the op in errors.
        rank: This rank.
        buffer: What the collective is to be run on.
        local: The other ranks of this host.
        remote: Those of other hosts.
    """
    text, digest = name_collective(f"memory for {name}", label, buffer)
    only = PreparedRound(1, True, (), tuple(peer for peer in local if peer != rank), [])
    only.sends = only.receives = [(peer, memoryview(b"")) for peer in remote]
    return PreparedCollective(digest, text, [only], (), Traffic(0, 0))


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def copy_kernel(target: Tensor, source: Tensor) -> Kernel:
    """A function that copies `source` to `target`."""

    def copy() -> None:
        target.copy_(source)

    return copy
