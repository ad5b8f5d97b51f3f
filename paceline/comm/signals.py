"""Where each rank of a host stands in the calls they make together: words in shared memory, sockets as alarm clocks.

Every rank has a page that the others can read. It writes there which call it is in and how far it has come, and looks
at its peers' pages: briefly spinning, then asleep on a socket to the peer, which wakes it by a byte. A peer that dies
closes its end of the socket, and the wait for it ends at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path

from paceline.comm.shared_memory import exchange_descriptors, exchange_memory
from paceline.comm.transport import CommunicationError

SPINS = 400
"""Looks at a peer's page before going to sleep, about 20 us: as long as it takes to fall asleep and be woken. Looking
holds the interpreter's lock, which the computing thread needs for its next op."""

_LOOK_SECONDS = 0.1
"""Between looks at what a peer does while asleep, whatever its socket says."""

_STAGES = 1 << 16
"""More than a call has stages; a rank's progress is call * _STAGES + stage, and only grows."""

_PAGE = 8192
_PROGRESS, _FAILED, _DIGESTS, _ASLEEP = 0, 8, 16, 32
"""Words of a page, of 8 bytes: progress, in a cache line of its own; whether this rank gave up; digests of the latest
calls; and who sleeps until this rank moves on, a word for each peer, which that peer writes."""
_CALLS = 8
"""Latest calls that a page tells of."""
_TEXTS, _TEXT = 4096, 448
"""Bytes of a page: what the latest calls are, in words, and then why this rank gave up."""
MOST_RANKS = _TEXTS // 8 - _ASLEEP
"""Ranks of one host that a page has room for."""


class Signals:
    """One rank's page, and its view of the others'."""

    def __init__(self, rank: int, channels: dict[int, socket.socket], timeout: float) -> None:
        """Exchanges pages with the peers. A collective call.

        Args:
            rank: This rank.
            channels: Connected to each peer, by its number; at most `MOST_RANKS` in all.
            timeout: Seconds after which a silent peer is given up.
        """
        self._rank = rank
        self._timeout = timeout
        self._pages = exchange_memory(rank, channels, _PAGE)
        self._words = {peer: memoryview(page).cast("q") for peer, page in self._pages.items()}
        self._own = self._words[rank]
        self._pids = {peer: _process_behind(channel) for peer, channel in channels.items()}
        # Bells of their own: emptying them must not swallow a descriptor under way.
        self._bells = {peer: _bell(rank, peer, channel) for peer, channel in channels.items()}
        # By position on the host: a group of many hosts has more ranks than a page has words.
        places = {peer: _ASLEEP + place for place, peer in enumerate(sorted(self._pages))}
        self._flag = places[rank]
        self._sleepers = [(places[peer], peer) for peer in channels]
        self._call = self._base = self._slot = self._digest = 0
        self._text = b""
        # Taking a lock orders memory: a store is seen before what follows it is done.
        self._fence = threading.Lock()
        self._spins = SPINS if len(self._pages) <= len(os.sched_getaffinity(0)) else 1

    def begin(self, digest: int, text: bytes) -> None:
        """Enters the next call; `publish` makes it known.

        Args:
            digest: The same number on every rank that makes the same call.
            text: What is called, for people; `text_of` gives it.
        """
        self._call += 1
        self._base = self._call * _STAGES
        self._slot = self._call % _CALLS
        self._digest, self._text = digest, text
        self._own[_DIGESTS + self._slot] = digest
        start = _TEXTS + self._slot * _TEXT
        self._pages[self._rank][start : start + _TEXT] = text

    def publish(self, stage: int) -> None:
        """Says that this rank has come to a stage of the call; who sees that, sees all it wrote before."""
        own = self._own
        with self._fence:
            own[_PROGRESS] = self._base + stage
        with self._fence:
            for index, peer in self._sleepers:
                if own[index]:
                    self._wake(peer)

    def wait(self, peer: int, stage: int) -> None:
        """Returns when a peer has come to a stage of the same call.

        Raises:
            CommunicationError: It is gone, gave up, calls something else, or did not come within the time limit.
        """
        words = self._words[peer]
        target = self._base + stage
        for _ in range(self._spins):
            if words[_PROGRESS] >= target:
                break
        else:
            self._sleep(peer, target)
        if words[_DIGESTS + self._slot] != self._digest:
            self._compare(peer)

    def check(self) -> None:
        """Raises if a peer gave up or makes another call, without waiting for it."""
        for peer in self._bells:
            self._look(peer, 0)

    def give_up(self, why: str) -> None:
        """Tells every peer that this rank will not come further, so that none waits for it."""
        start = _TEXTS + _CALLS * _TEXT
        self._pages[self._rank][start : start + _TEXT] = text_of(why)
        self._own[_FAILED] = 1
        for peer in self._bells:
            self._wake(peer)

    def interrupt(self) -> None:
        """Ends the connections, which closing a socket alone would not do while a thread waits on it."""
        for bell in self._bells.values():
            with contextlib.suppress(OSError):
                bell.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the sockets; a peer that waits for this rank is told so by that."""
        for bell in self._bells.values():
            bell.close()

    def _wake(self, peer: int) -> None:
        # A full socket wakes as well; one that is gone is noticed by whoever waits for it.
        with contextlib.suppress(OSError):
            self._bells[peer].send(b"!")

    def _sleep(self, peer: int, target: int) -> None:
        words = self._words[peer]
        flag = self._flag
        deadline = time.monotonic() + self._timeout
        poll = select.poll()
        if self._bells[peer].fileno() < 0:
            raise self._gone(peer)
        poll.register(self._bells[peer], select.POLLIN)
        try:
            while True:
                words[flag] = 1
                # Before the last look at its progress: what this takes from the bell may have told of it.
                self._look(peer, target)
                with self._fence:
                    if words[_PROGRESS] >= target:
                        return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._silent(peer)
                poll.poll(1000 * min(left, _LOOK_SECONDS))
        finally:
            words[flag] = 0

    def _look(self, peer: int, target: int) -> None:
        """Raises if waiting for a peer to come to `target` has become pointless; empties its bell."""
        words = self._words[peer]
        try:
            gone = not self._bells[peer].recv(4096)
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        # Read before its progress: it may have come this far, and given up something later.
        failed = words[_FAILED]
        progress = words[_PROGRESS]
        if progress >= self._base and words[_DIGESTS + self._slot] != self._digest:
            self._compare(peer)
        if target and progress >= target:
            return
        if failed:
            raise CommunicationError(f"rank {peer} gave up: {self._read(peer, _CALLS)}")
        if gone and target:
            raise self._gone(peer)

    def _compare(self, peer: int) -> None:
        call = self._words[peer][_PROGRESS] // _STAGES
        if call >= self._call + _CALLS - 1:
            # It is so far ahead that it tells of this call no more, or is about to tell of another in its place.
            return
        raise CommunicationError(
            f"ranks disagree on what to communicate: rank {self._rank} is in call {self._call}, {plain(self._text)}; "
            f"rank {peer} is in call {self._call}, {self._read(peer, self._slot)}. Every rank must run the same model "
            "with the same strategy and the same number of micro-batches"
        )

    def _read(self, peer: int, slot: int) -> str:
        start = _TEXTS + slot * _TEXT
        return plain(self._pages[peer][start : start + _TEXT])

    def _gone(self, peer: int) -> CommunicationError:
        return CommunicationError(f"rank {peer} is gone: rank {self._rank} waited for it in {plain(self._text)}")

    def _silent(self, peer: int) -> CommunicationError:
        return CommunicationError(
            f"rank {peer} did not answer within {self._timeout:g} s: rank {self._rank} waited for it in "
            f"{plain(self._text)}"
            # It may itself be waiting for another.
            + "".join(f"; rank {other}'s {text}" for other, pid in self._pids.items() if (text := _stopped(pid)))
        )


def text_of(words: str) -> bytes:
    """Words as pages hold them, cut where they are too long."""
    return words.encode()[:_TEXT].ljust(_TEXT, b"\0")


def plain(text: bytes) -> str:
    """What `text_of` was given."""
    return text.rstrip(b"\0").decode(errors="replace")


def _bell(rank: int, peer: int, channel: socket.socket) -> socket.socket:
    """One end of a connection to a peer; the lower rank makes it."""
    ours, theirs = socket.socketpair()
    with theirs:
        received = socket.socket(fileno=exchange_descriptors(rank, peer, channel, theirs.fileno()))
    bell, spare = (ours, received) if rank < peer else (received, ours)
    spare.close()
    bell.setblocking(False)
    return bell


def _process_behind(channel: socket.socket) -> int:
    pid: int = struct.unpack("iII", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def _stopped(pid: int) -> str:
    """Says so if a process was stopped, as by SIGSTOP."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return f"process {pid} is stopped: `kill -CONT {pid}` lets it go on" if state in "Tt" else ""
