"""Workers that have a line to their launcher each, by which they are told their places."""

from __future__ import annotations

import functools
import os
import socket
import sys
from abc import abstractmethod
from pathlib import Path
from typing import Any

from paceline.launch.process import Command
from paceline.launch.seat import SeatLine, ToWorker
from paceline.launch.workers import Job

_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""What a worker is until it has a place: this process may itself be one of a job, with the other hosts' launchers."""


class SeatedJob(Job):
    """Workers with a `Seat` each, by number."""

    def __init__(self, folder: Path, command: Command, workers: int, threads: int) -> None:
        """Starts nothing yet; see `Job`."""
        super().__init__(folder, command, workers, threads)
        self._seats: dict[int, ToWorker] = {}
        self._rank_of: dict[int, int] = {}
        """The latest rank of each worker that had one."""

    def _rank(self, number: int) -> int:
        return self._rank_of.get(number, number)

    @abstractmethod
    def _take(self, number: int, message: dict[str, Any]) -> None:
        """Takes in what a worker says."""

    def _start_seated(self) -> int:
        """Starts another worker on this host; returns its number."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        screen = [os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
        lines = [theirs.fileno(), *screen]
        try:
            number = self._start_worker(_ALONE, has_screen=False, lines=lines)
        finally:
            theirs.close()
            for descriptor in screen:
                os.close(descriptor)
        seat = self._seats[number] = SeatLine(ours)
        # Its end is seen at once by the end of the line.
        self._listen(ours, functools.partial(self._hear_from, number, seat))
        return number

    def _hear_from(self, number: int, seat: SeatLine) -> bool:
        message = seat.receive()
        if message is not None:
            self._take(number, message)
        return message is not None
