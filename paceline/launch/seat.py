"""A worker's line to the launcher, by which it is given its place in a job, and another one when a rank is lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

from paceline.comm.environment import JOINING

SEAT = "PACELINE_SEAT"
"""Descriptors: of the line to the launcher, of its stdout and of its stderr."""
_LARGEST = 1 << 16
JOINING_SECONDS = 15.0


@dataclass(frozen=True)
class Place:
    """A worker's place in the job.

    Attributes:
        epoch: Number of the job among those that the launcher has formed.
        rank: In the job.
        world_size: Ranks of the job.
        local_rank: Among the ranks of this host.
        local_world_size: Ranks of the job on this host.
        threads: That each computes with.
        rendezvous: Where they meet.
        memory: A folder in memory by which ranks that were in an earlier job hand on what they hold: of this path on
            every host, and each host's own.
        work: What ranks of an earlier job have said they work on; empty where none has.
    """

    epoch: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    threads: int
    rendezvous: str
    memory: str
    work: str

    def environment(self) -> dict[str, str]:
        """The variables by which `pl.init` and torch learn of it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "OMP_NUM_THREADS": str(self.threads),
            "PACELINE_RENDEZVOUS": self.rendezvous,
            # Who asked for a place is ready to join; one that is lost meanwhile must not hold the others up.
            **({JOINING: str(JOINING_SECONDS)} if self.epoch else {}),
        }


class ToWorker(Protocol):
    """The launcher's end of the line to one worker."""

    def send(self, message: dict[str, Any]) -> None:
        """Says something; to one who is gone, nothing."""

    def end(self) -> None:
        """Says nothing more: a worker that waits for a place ends."""


class SeatLine:
    """The line to a worker of this host; see `ToWorker`."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes it over: of a kind that keeps messages apart."""
        self.connection = connection

    def send(self, message: dict[str, Any]) -> None:
        """See `ToWorker`."""
        with contextlib.suppress(OSError):
            self.connection.send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """What the worker says next, waiting for it if it must; None when it is gone."""
        return _receive(self.connection)

    def end(self) -> None:
        """See `ToWorker`."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


class Seat:
    """The worker's end of the line.

    Attributes:
        place: The present one; None before the first.
        stepped: When the latest step was done, on the host's monotonic clock; None before the first.
    """

    def __init__(self, line: socket.socket, screen: tuple[int, int]) -> None:
        """Takes the line over.

        Args:
            line: To the launcher.
            screen: Descriptors of its stdout and stderr, which become this process's own when it is rank 0.
        """
        self._line, self._screen = line, screen
        self.place: Place | None = None
        self.stepped: float | None = None
        self._given: Place | None = None
        self._leaves = self._has_stepped = False
        self._broken = ""
        self._hearing = threading.Lock()

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """The seat that the launcher gave this process; None where it gave none, as ranks are not replaced."""
        if SEAT not in environment:
            return None
        # Taken out, as what this process starts in turn is no worker.
        line, *screen = map(int, environment.pop(SEAT).split(","))
        return cls(socket.socket(fileno=line), (screen[0], screen[1]))

    def take_place(self, warm_up: Callable[[], object], holds: str = "", done: int = 0) -> Place | None:
        """Waits for a place and sets the environment accordingly; None where this worker is not needed any more.

        Args:
            warm_up: Called before waiting by a worker that has never had a place and is given none at once.
            holds: What this worker holds of the work; others that say the same hold the same.
            done: How many steps of it: who has done most becomes rank 0.
        """
        if self.place is None and not _has_news(self._line):
            warm_up()
        self._send({"wait": -1 if self.place is None else self.place.epoch, "holds": holds, "done": done})
        while self._given is None:
            if not self._hear(wait=True):
                return None
        self.place, self._given = self._given, None
        self._leaves, self._has_stepped, self._broken = False, False, ""
        os.environ.update(self.place.environment())
        if self.place.rank == 0:
            for own, theirs in zip((1, 2), self._screen, strict=True):
                os.dup2(theirs, own)
        return self.place

    def asks_to_leave(self) -> bool:
        """Whether the launcher asks the ranks to leave the job at the end of a step, as it can be a larger one."""
        self._hear()
        return self._leaves

    def why_broken(self) -> str:
        """Why other ranks of the job will not answer, as the launcher knows; empty while it knows of nothing.

        Any thread may ask.
        """
        self._hear()
        return self._broken

    def has_stepped(self, work: str) -> None:
        """Called after each step: lets the launcher know that the job does some, and what it works on.

        Those who know nothing of it are told that.
        """
        self.stepped = time.monotonic()
        if not self._has_stepped and self.place is not None:
            self._has_stepped = True
            self._send({"step": self.place.epoch, "work": work})

    def has_planned(self, strategy: dict[str, Any]) -> None:
        """Lets the launcher know by what strategy ranks share the work, where that is not what the command says."""
        self._send({"planned": strategy})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(message).encode())

    def _hear(self, wait: bool = False) -> bool:
        """Takes in what the launcher has said, or says next; False when it is gone."""
        if wait:
            _has_news(self._line, wait=True)
        with self._hearing:
            while _has_news(self._line):
                message = _receive(self._line)
                if message is None:
                    return False
                epoch = None if self.place is None else self.place.epoch
                if "place" in message:
                    self._given = Place(**message["place"])
                elif message.get("leave", -1) == epoch:
                    self._leaves = True
                elif message.get("broken", -1) == epoch:
                    self._broken = message["why"]
        return True


def _has_news(line: socket.socket, wait: bool = False) -> bool:
    """Whether a message has come, or the end of the line; waits for that if it must."""
    # Not select.select, which refuses descriptors over 1,023: a worker's own code may have that many files open.
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(None if wait else 0))


def _receive(line: socket.socket) -> dict[str, Any] | None:
    try:
        data = line.recv(_LARGEST)
    except ConnectionError:
        return None
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message


def place_message(place: Place) -> dict[str, Any]:
    """What `Seat.take_place` understands."""
    return {"place": asdict(place)}
