"""How far each rank of a host has come in the collectives they run together: words in shared memory, and wake-ups.

Every rank has a page that the others can read. It writes there which collective it is in and how far it has come, and
looks at its peers' pages: briefly spinning, then asleep on a socket to the peer, which wakes it by a byte. A peer that
dies closes its end of the socket, and the wait for it ends at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from paceline.comm.cpu.registry import find_deadlock
from paceline.comm.cpu.shared_memory import exchange_descriptors, exchange_memory
from paceline.comm.patience import Silence, limit
from paceline.comm.streams import is_waited_for
from paceline.comm.transport import CommunicationError, DisagreementError, SilenceError, aborted_by

SPINS = 400
"""Looks at a peer's page before going to sleep, about 20 us: as long as it takes to fall asleep and be woken. Looking
holds the interpreter's lock, which the computing thread needs for its next op."""

_POLL_SECONDS = 0.1
"""Between looks at what a peer does while asleep, whatever its socket says."""

_SUSPECT_SECONDS = 0.5
"""Between looks at whether the peer waits for this rank in turn; twice the same is a deadlock."""

_STAGES = 1 << 16
"""More than a collective has stages; a rank's progress is number * _STAGES + stage, and only grows."""

_PAGE = 8192
_PROGRESS, _FAILED, _BLOCKED, _DIGESTS, _ASLEEP = 0, 8, 9, 16, 32
"""Words of a page, of 8 bytes: progress, in a cache line of its own; whether this rank gave up; whether its program
waits for the collective that it sleeps in; digests of the latest ones; and who sleeps until this rank moves on, a word
for each peer, which that peer writes."""
_BETWEEN, _INSIDE = 1, 2
"""Where a rank gave up: between two collectives, or in the middle of the latest that it tells of."""
_LATEST = 8
"""Latest collectives that a page tells of."""
_TEXTS, _TEXT = 4096, 448
"""Bytes of a page: what the latest collectives are, in words, and then why this rank gave up."""
MOST_RANKS = _TEXTS // 8 - _ASLEEP
"""Ranks of one host that a page has room for."""


class Signals:
    """One rank's page, and its view of the others'.

    Attributes:
        number: Of the collective that was entered last.
    """

    def __init__(
        self, rank: int, channels: dict[int, socket.socket], timeout: float, world_ranks: Sequence[int] | None = None
    ) -> None:
        """Exchanges pages with the peers. A collective call.

        Args:
            rank: This rank.
            channels: Connected to each peer, by its number; at most `MOST_RANKS` in all.
            timeout: Seconds after which a silent peer is given up.
            world_ranks: What errors call each rank, if not by its number.
        """
        self._rank = rank
        self._name = world_ranks.__getitem__ if world_ranks is not None else int
        self._timeout = timeout
        self._pages = exchange_memory(rank, channels, _PAGE)
        self._words = {peer: memoryview(page).cast("q") for peer, page in self._pages.items()}
        self._own = self._words[rank]
        # Sockets of their own: emptying them must not swallow a descriptor under way.
        self._wake_sockets = {peer: _wake_socket(rank, peer, channel) for peer, channel in channels.items()}
        # By position on the host: a group of many hosts has more ranks than a page has words.
        places = {peer: _ASLEEP + place for place, peer in enumerate(sorted(self._pages))}
        self._flag = places[rank]
        self._sleepers = [(places[peer], peer) for peer in channels]
        self.number = self._base = self._slot = self._digest = 0
        self._text = b""
        # Taking a lock orders memory: a store is seen before what follows it is done.
        self._fence = threading.Lock()
        self._spins = SPINS if len(self._pages) <= len(os.sched_getaffinity(0)) else 1

    def begin(self, digest: int, text: bytes) -> None:
        """Enters the next collective; `publish` makes it known.

        Args:
            digest: The same number on every rank that runs the same collective.
            text: What is run, for people; `text_of` gives it.
        """
        self.number += 1
        self._base = self.number * _STAGES
        self._slot = self.number % _LATEST
        self._digest, self._text = digest, text
        self._own[_DIGESTS + self._slot] = digest
        start = _TEXTS + self._slot * _TEXT
        self._pages[self._rank][start : start + _TEXT] = text

    def publish(self, stage: int) -> None:
        """Says that this rank has come to a stage of the collective; who sees that, sees all it wrote before."""
        own = self._own
        with self._fence:
            own[_PROGRESS] = self._base + stage
        with self._fence:
            for index, peer in self._sleepers:
                if own[index]:
                    self._wake(peer)

    def wait(self, peer: int, stage: int) -> None:
        """Returns when a peer has come to a stage of the same collective.

        Raises:
            CommunicationError: It is gone, gave up, runs something else, or did not come within the time limit.
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
        """Raises if a peer gave up or runs another collective, without waiting for it."""
        for peer in self._wake_sockets:
            self._look(peer, 0)

    def blocked_peers(self) -> Iterator[tuple[int, str]]:
        """Peers whose programs wait for this rank in a collective that this rank has not entered; and which."""
        for index, peer in self._sleepers:
            number = self._words[peer][_PROGRESS] // _STAGES
            if self._own[index] and self._words[peer][_BLOCKED] and number > self.number:
                yield self._name(peer), self._read(peer, number % _LATEST)

    def abort(self, reason: str, inside: bool = False) -> None:
        """Tells every peer that this rank will not come further, so that none waits for it.

        Args:
            reason: Why.
            inside: Whether it is in the middle of a collective, which then comes to an end on no rank.
        """
        start = _TEXTS + _LATEST * _TEXT
        self._pages[self._rank][start : start + _TEXT] = text_of(reason)
        self._own[_FAILED] = _INSIDE if inside else _BETWEEN
        for peer in self._wake_sockets:
            self._wake(peer)

    def interrupt(self) -> None:
        """Ends the connections, which closing a socket alone would not do while a thread waits on it."""
        for wake_socket in self._wake_sockets.values():
            with contextlib.suppress(OSError):
                wake_socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Lets go of the sockets; a peer that waits for this rank is told so by that."""
        for wake_socket in self._wake_sockets.values():
            wake_socket.close()

    def _wake(self, peer: int) -> None:
        # A full socket wakes as well; one that is gone is noticed by whoever waits for it.
        with contextlib.suppress(OSError):
            self._wake_sockets[peer].send(b"!")

    def _sleep(self, peer: int, target: int) -> None:
        words = self._words[peer]
        flag = self._flag
        silence = Silence(self._timeout)
        suspicion, suspect_at = "", time.monotonic() + _SUSPECT_SECONDS
        poll = select.poll()
        if self._wake_sockets[peer].fileno() < 0:
            raise self._gone(peer)
        poll.register(self._wake_sockets[peer], select.POLLIN)
        try:
            while True:
                words[flag] = 1
                self._own[_BLOCKED] = is_waited_for()
                # Before the last look at its progress: what this takes from the socket may have told of it.
                self._look(peer, target)
                with self._fence:
                    if words[_PROGRESS] >= target:
                        return
                self._look_around(peer)
                if (left := silence.left()) <= 0:
                    raise self._silent(peer)
                if (now := time.monotonic()) > suspect_at:
                    suspicion, suspect_at = self._suspect(peer, suspicion), now + _SUSPECT_SECONDS
                poll.poll(1000 * min(left, _POLL_SECONDS))
        finally:
            words[flag] = self._own[_BLOCKED] = 0

    def _suspect(self, peer: int, before: str) -> str:
        """How this rank and a peer wait for each other, in words, if they do; raises if they did `before`."""
        if not self._own[_BLOCKED]:
            return ""
        waiting = f"rank {self._name(self._rank)} waits in {plain(self._text)}"
        found = find_deadlock(waiting, self._name(peer))
        if found is None:
            return ""
        if found.reason == before:
            found.transport.abort(found.reason)
            raise DisagreementError(found.reason)
        return found.reason

    def _look(self, peer: int, target: int) -> None:
        """Raises if waiting for a peer to come to `target` has become pointless; empties its wake-ups."""
        words = self._words[peer]
        try:
            gone = not self._wake_sockets[peer].recv(4096)
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
            raise aborted_by(self._name(peer), self._read(peer, _LATEST))
        if gone and target:
            raise self._gone(peer)

    def _look_around(self, awaited: int) -> None:
        """Raises if a peer gave up without which the collective cannot end, whoever is waited for.

        The awaited one may not know of it: it can be in a collective of another group, or of another model.
        """
        for peer in self._wake_sockets:
            if peer == awaited or not (failed := self._words[peer][_FAILED]):
                continue
            number = self._words[peer][_PROGRESS] // _STAGES
            if number < self.number or (number == self.number and failed == _INSIDE):
                raise aborted_by(self._name(peer), self._read(peer, _LATEST))

    def _compare(self, peer: int) -> None:
        number = self._words[peer][_PROGRESS] // _STAGES
        if number >= self.number + _LATEST - 1:
            # It is so far ahead that it tells of this one no more, or is about to tell of another in its place.
            return
        raise DisagreementError(
            f"ranks disagree on what to communicate: rank {self._name(self._rank)} is in collective {self.number}, "
            f"{plain(self._text)}; rank {self._name(peer)} is in collective {self.number}, "
            f"{self._read(peer, self._slot)}. Every rank must run the same model with the same strategy and the same "
            "number of micro-batches"
        )

    def _read(self, peer: int, slot: int) -> str:
        start = _TEXTS + slot * _TEXT
        return plain(self._pages[peer][start : start + _TEXT])

    def _gone(self, peer: int) -> CommunicationError:
        return CommunicationError(
            f"rank {self._name(peer)} is gone: rank {self._name(self._rank)} waited for it in {plain(self._text)}"
        )

    def _silent(self, peer: int) -> SilenceError:
        return SilenceError(
            f"rank {self._name(peer)} did not answer within {limit(self._timeout):g} s: rank {self._name(self._rank)} "
            f"waited for it in {plain(self._text)}"
        )


def text_of(words: str) -> bytes:
    """Words as pages hold them, cut where they are too long."""
    return words.encode()[:_TEXT].ljust(_TEXT, b"\0")


def plain(text: bytes) -> str:
    """What `text_of` was given."""
    return text.rstrip(b"\0").decode(errors="replace")


def _wake_socket(rank: int, peer: int, channel: socket.socket) -> socket.socket:
    """One end of a connection to a peer; the lower rank makes it."""
    ours, theirs = socket.socketpair()
    with theirs:
        received = socket.socket(fileno=exchange_descriptors(rank, peer, channel, theirs.fileno()))
    kept, spare = (ours, received) if rank < peer else (received, ours)
    spare.close()
    kept.setblocking(False)
    return kept
