"""Every rank's thread that says where the rank is when another waits in vain, whatever the rank itself does then.

It wakes up once a second to give a sign of life to rank 0 (`roll_call.py`), and computes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.comm import whereabouts
from paceline.comm.authentication import SignedMessages
from paceline.comm.cpu import tcp_connect
from paceline.comm.mates import Mates, answer_signals, process
from paceline.comm.roll_call import ANSWER_SECONDS, RollCall
from paceline.comm.transport import Exchange

SIGN_SECONDS = 1.0
_RANKS_A_SECOND = 64
"""Signs of life that rank 0 hears: of more ranks each comes more rarely."""
_STACKS_SECONDS = 10.0
"""Between two times that a rank prints its stacks, however many ask."""
_ENDING_SECONDS = 1.0
_HUB, _MEMBER = "rank 0 to rank {}", "rank {} to rank 0"


class Watch:
    """This rank's thread."""

    def __init__(self, rank: int, world_size: int, exchange: Exchange, timeout: float, secret: bytes) -> None:
        """Connects to rank 0. A collective call.

        Args:
            rank: This rank.
            world_size: Number of ranks.
            exchange: Gathers one JSON value from every rank of the job, in rank order; says what it is about.
            timeout: Seconds to wait for a peer.
            secret: The job's.

        Raises:
            CommunicationError: Rank 0 cannot be reached.
        """
        self._rank, self._world_size = rank, world_size
        # Transports of an earlier job of this process may still be there.
        self._job = hashlib.sha256(secret).hexdigest()[:8]
        answer_signals()
        self._mates = Mates(rank, [(host, number) for host, number in exchange(process(), "processes")])
        everyone = range(world_size)
        peers = list(everyone[1:]) if rank == 0 else [0]
        (sockets,) = tcp_connect.connect(rank, [everyone], [peers], exchange, timeout, secret)
        self._hub: RollCall | None = None
        if rank == 0:
            sockets[0], to_hub = socket.socketpair()
            self._hub = RollCall(
                {
                    other: SignedMessages(each, secret, _HUB.format(other), _MEMBER.format(other))
                    for other, each in sockets.items()
                }
            )
        else:
            to_hub = sockets[0]
        self._messages = SignedMessages(to_hub, secret, _MEMBER.format(rank), _HUB.format(rank))
        self._look = whereabouts.Look()
        self._printed = -_STACKS_SECONDS
        self._transports = 0
        self._questions = 0
        self._found: dict[int, list[dict[str, Any]]] = {}
        self._first: tuple[dict[str, Any], float] = ({}, time.monotonic())
        """Where rank 0 was, and when that was said."""
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="paceline watch", daemon=True)
        self._thread.start()

    def new_transport(self) -> str:
        """A name for the next transport, the same on every rank of the job."""
        self._transports += 1
        return f"transport {self._transports} of job {self._job}"

    def missing(self, collectives: str, entered: int, group: Sequence[int]) -> list[str]:
        """Who does not come to a collective and where they are, in words; has every rank print its stacks.

        Args:
            collectives: Those of one transport, or control messages; see `roll_call.Asked`.
            entered: The number of the one that this rank waits in.
            group: Ranks that it is of.
        """
        with self._news:
            self._questions += 1
            number = self._questions
        with contextlib.suppress(ConnectionError):
            self._messages.send({"ask": [number, collectives, entered, list(group)]})
            with self._news:
                # Rank 0 waits itself, and then tells.
                if self._news.wait_for(lambda: number in self._found, 2 * ANSWER_SECONDS):
                    return [*self._mates.stopped(), *map(_told, self._found.pop(number))]
        stopped = self._mates.stopped()
        place, said = self._first
        if self._rank and place and 0 in group:
            self._print_stacks(self._rank)
            self._mates.shake([0])
            stopped.append(_told({**place, "rank": 0, "silent": True, "seconds": time.monotonic() - said}))
        return stopped

    def close(self) -> None:
        """Ends the thread."""
        self._messages.interrupt()
        # It may be writing to where nobody reads.
        self._thread.join(_ENDING_SECONDS)
        self._messages.close()
        self._mates.close()

    def close_in_child(self) -> None:
        """Closes this process's ends, as a child of it that has no thread of them."""
        self._messages.connection.close()
        if self._hub is not None:
            self._hub.close_in_child()

    def _run(self) -> None:
        pause = max(SIGN_SECONDS, self._world_size / _RANKS_A_SECOND)
        due = time.monotonic()
        poll = select.poll()
        poll.register(self._messages.connection, select.POLLIN)
        with contextlib.suppress(OSError, ValueError):
            while True:
                if time.monotonic() >= due:
                    due = time.monotonic() + pause
                    self._messages.send({"place": self._look.again()})
                ready = poll.poll(1000 * max(0.0, due - time.monotonic()))
                for message in self._messages.receive() if ready else ():
                    self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._print_stacks(message["by"])
            self._messages.send({"place": self._look.again(), "call": message["call"]})
        elif "first" in message:
            self._first = message["first"], time.monotonic()
        elif "shake" in message:
            self._mates.shake(message["shake"])
        elif "found" in message:
            with self._news:
                self._found[message["found"]] = message["ranks"]
                self._news.notify_all()

    def _print_stacks(self, by: int) -> None:
        if (now := time.monotonic()) < self._printed + _STACKS_SECONDS:
            return
        self._printed = now
        head = f"rank {self._rank} of {self._world_size}, process {os.getpid()}, while rank {by} waits in vain: "
        # In one piece, as ranks may have one terminal.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{head}{self._look.in_words()}\n{whereabouts.stacks()}\n\n")
            sys.stderr.flush()


_watch: Watch | None = None


def begin(rank: int, world_size: int, exchange: Exchange, timeout: float, secret: bytes) -> None:
    """Begins to watch over the job that this process joins. A collective call; see `Watch`."""
    global _watch
    whereabouts.messages, whereabouts.latest = 0, None
    _watch = Watch(rank, world_size, exchange, timeout, secret)


def end() -> None:
    """Ends it with the job."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def new_transport() -> str:
    """See `Watch.new_transport`."""
    return _watch.new_transport() if _watch is not None else ""


def missing(collectives: str, entered: int, group: Sequence[int]) -> list[str]:
    """See `Watch.missing`."""
    return _watch.missing(collectives, entered, group) if _watch is not None else []


def _told(found: dict[str, Any]) -> str:
    """Where a rank is, as a clause."""
    what = "gives no sign of life" if found["silent"] else "never entered it"
    if "words" not in found:
        return f"rank {found['rank']} {what}"
    where = f", at {found['at']}" if found["at"] else ""
    return f"rank {found['rank']} {what}: last seen {found['seconds']:.1f} s ago in {found['words']}{where}"


def _after_fork() -> None:
    global _watch
    if _watch is not None:
        _watch.close_in_child()
        _watch = None


os.register_at_fork(after_in_child=_after_fork)
