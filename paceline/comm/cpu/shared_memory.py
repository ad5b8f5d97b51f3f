"""Memory that the ranks of one host share, without a name.

Buffers are anonymous (`memfd_create`) and their descriptors travel over Unix sockets, so there is nothing that a
stranger could open or that a killed process could leave behind, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.cpu.residuals import Key, Residuals, SavedResiduals
from paceline.comm.transport import CommunicationError

NAME = "paceline"
"""Of memory that ranks share, for whoever looks at a process's mappings; it opens nothing."""

_OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def exchange_memory(rank: int, channels: Mapping[int, socket.socket], size: int) -> dict[int, mmap.mmap]:
    """Maps a zeroed piece of memory of every rank into each. A collective call.

    Args:
        rank: This rank.
        channels: Unix sockets to its peers, which carry nothing else.
        size: Bytes, the same on every rank.

    Returns:
        The memory of each rank, by rank.

    Raises:
        CommunicationError: A peer is gone or silent.
    """
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    # A peer that shrank the file would turn our next read into a SIGBUS.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    descriptors = {rank: descriptor}
    try:
        for peer in sorted(channels):
            descriptors[peer] = exchange_descriptors(rank, peer, channels[peer], descriptor)
        return {peer: mmap.mmap(descriptors[peer], size) for peer in sorted(descriptors)}
    finally:
        for held in descriptors.values():
            os.close(held)


def exchange_descriptors(rank: int, peer: int, channel: socket.socket, descriptor: int) -> int:
    """Sends a peer an open descriptor and returns the one that it sends."""
    try:
        socket.send_fds(channel, [b"m"], [descriptor])
        _, received, _, _ = socket.recv_fds(channel, 1, 1)
    except TimeoutError as error:
        raise CommunicationError(
            f"rank {peer} did not answer within {channel.gettimeout():g} s: rank {rank} waited for its memory"
        ) from error
    except OSError as error:
        raise CommunicationError(f"rank {peer} is gone: rank {rank} waited for its memory") from error
    if not received:
        raise CommunicationError(f"rank {peer} is gone: rank {rank} waited for its memory")
    # Programs that this process starts must not hold it: the end of this rank would not be seen by its peers.
    os.set_inheritable(received[0], False)
    return received[0]


@dataclass(frozen=True, slots=True)
class _Region:
    """One buffer of every rank, mapped into this process."""

    start: int
    stop: int
    peers: dict[int, Tensor]
    residuals: Residuals


class SharedBuffers:
    """Buffers that every rank of the host can read and write."""

    def __init__(self, rank: int, channels: dict[int, socket.socket]) -> None:
        """Allocates nothing yet; see `exchange_memory` for the arguments."""
        self._rank = rank
        self._channels = channels
        # By this rank's part: when nothing uses that any more, the peers' are let go of too.
        self._regions: weakref.WeakKeyDictionary[mmap.mmap, _Region] = weakref.WeakKeyDictionary()
        self._before: dict[Key, Tensor] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """This rank's part of a new zeroed buffer. A collective call."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        size = numel * dtype.itemsize
        memories = (
            exchange_memory(self._rank, self._channels, size)
            if self._channels
            else {self._rank: mmap.mmap(-1, size, flags=_OWN)}
        )
        tensors = {peer: torch.frombuffer(memory, dtype=dtype) for peer, memory in memories.items()}
        own = tensors.pop(self._rank)
        start = own.data_ptr()
        self._regions[memories[self._rank]] = _Region(start, start + size, tensors, Residuals(start, self._before))
        return own

    def views(self, buffer: Tensor) -> dict[int, Tensor] | None:
        """The same range of every local rank's buffer, or None where `buffer` was not allocated here."""
        region = self._region(buffer)
        if region is None:
            return None
        first = (buffer.data_ptr() - region.start) // buffer.itemsize
        # A buffer may be seen as another dtype than it was allocated as.
        views = {
            peer: tensor.view(buffer.dtype)[first : first + buffer.numel()] for peer, tensor in region.peers.items()
        }
        return {**views, self._rank: buffer}

    def residuals(self, buffer: Tensor) -> Residuals:
        """Residuals of the messages sent from a buffer, for as long as it lives.

        Of a tensor that was not allocated here nothing is remembered.
        """
        region = self._region(buffer)
        return Residuals(buffer.data_ptr(), {}) if region is None else region.residuals

    def saved_residuals(self) -> SavedResiduals:
        """Residuals of all messages."""
        kept = [item for region in list(self._regions.values()) for item in region.residuals.kept.items()]
        return [*kept, *self._before.items()]

    def load_residuals(self, saved: SavedResiduals) -> None:
        """Makes these the residuals of all messages, those that are still to be sent for the first time, too."""
        self._before.clear()
        self._before.update(saved)
        for region in list(self._regions.values()):
            for key in region.residuals.kept:
                region.residuals.take_over(key)

    def inherit(self, other: SharedBuffers) -> None:
        """Takes over another's buffers: memory outlives the connections that brought it.

        Residuals are those of a step that came to nothing, and start anew.
        """
        self._regions, self._before = other._regions, other._before
        self.load_residuals([])

    def _region(self, buffer: Tensor) -> _Region | None:
        address = buffer.data_ptr()
        for region in list(self._regions.values()):
            if region.start <= address < region.stop:
                return region
        return None
