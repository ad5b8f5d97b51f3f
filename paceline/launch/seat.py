"""A worker's line to the launcher, by which it is given its place in a job, and another one when a rank is lost."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Self

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
        world_size: Ranks of the job, all on this host.
        threads: That each computes with.
        rendezvous: Where they meet.
        memory: A folder in memory by which ranks that were in an earlier job hand on what they hold.
        work: What ranks of an earlier job have said they work on; empty where none has.
    """

    epoch: int
    rank: int
    world_size: int
    threads: int
    rendezvous: str
    memory: str
    work: str

    def environment(self) -> dict[str, str]:
        """The variables by which `pl.init` and torch learn of it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "OMP_NUM_THREADS": str(self.threads),
            "PACELINE_RENDEZVOUS": self.rendezvous,
            # Who asked for a place is ready to join; one that is lost meanwhile must not hold the others up.
            **({JOINING: str(JOINING_SECONDS)} if self.epoch else {}),
        }


def send(line: socket.socket, **message: Any) -> None:
    """Sends one message; to one who is gone, nothing."""
    try:
        line.send(json.dumps(message).encode())
    except OSError:
        return


def receive(line: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other end is gone.

    Raises:
        BlockingIOError: There is none yet, and the line does not wait.
    """
    try:
        data = line.recv(_LARGEST)
    except ConnectionError:
        return None
    message: dict[str, Any] | None = json.loads(data) if data else None
    return message


class Seat:
    """The worker's end of the line.

    Attributes:
        place: The present one; None before the first.
    """

    def __init__(self, line: socket.socket, screen: tuple[int, int]) -> None:
        """Takes the line over.

        Args:
            line: To the launcher.
            screen: Descriptors of its stdout and stderr, which become this process's own when it is rank 0.
        """
        self._line, self._screen = line, screen
        self.place: Place | None = None
        self._leaves = self._has_stepped = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self | None:
        """The seat that the launcher gave this process; None where it gave none, as ranks are not replaced."""
        if SEAT not in environment:
            return None
        # Taken out, as what this process starts in turn is no worker.
        line, *screen = map(int, environment.pop(SEAT).split(","))
        return cls(socket.socket(fileno=line), (screen[0], screen[1]))

    def take_place(self, warm_up: Callable[[], object], holds: str = "") -> Place | None:
        """Waits for a place and sets the environment accordingly; None where this worker is not needed any more.

        Args:
            warm_up: Called before waiting by a worker that has never had a place and is given none at once.
            holds: What this worker holds of the work; others that say the same hold the same.
        """
        if self.place is None and not select.select([self._line], [], [], 0)[0]:
            warm_up()
        send(self._line, wait=-1 if self.place is None else self.place.epoch, holds=holds)
        self._line.setblocking(True)
        while (message := receive(self._line)) is not None:
            if "place" in message:
                self.place = Place(**message["place"])
                self._leaves = self._has_stepped = False
                os.environ.update(self.place.environment())
                if self.place.rank == 0:
                    for own, theirs in zip((1, 2), self._screen, strict=True):
                        os.dup2(theirs, own)
                self._line.setblocking(False)
                return self.place
        return None

    def asks_to_leave(self) -> bool:
        """Whether the launcher asks the ranks to leave the job at the end of a step, as it can be a larger one."""
        if not self._leaves:
            try:
                message = receive(self._line)
            except BlockingIOError:
                return False
            self._leaves = message is not None and message.get("leave") == (self.place and self.place.epoch)
        return self._leaves

    def has_stepped(self, work: str) -> None:
        """Lets the launcher know that the job does steps, and what it works on, for those who know nothing of it."""
        if not self._has_stepped and self.place is not None:
            self._has_stepped = True
            send(self._line, step=self.place.epoch, work=work)


def place_message(place: Place) -> dict[str, Any]:
    """What `Seat.take_place` understands."""
    return {"place": asdict(place)}
