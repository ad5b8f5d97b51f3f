"""A worker of another host, as the leading launcher sees it: what is asked of it goes to that host's launcher."""

from __future__ import annotations

import signal
from typing import IO, Any

from paceline.launch.host_line import HostLine


class RemoteProcess:
    """Its process; see `Process`.

    Attributes:
        returncode: What its launcher has said, None while it runs.
        stderr: None: that launcher shows what it writes.
        stopped: What its launcher has said last.
    """

    stderr: IO[bytes] | None = None

    def __init__(self, line: HostLine, number: int) -> None:
        """A process that is about to be started.

        Args:
            line: To its launcher.
            number: Of the worker.
        """
        self._line, self._number = line, number
        self.returncode: Any = None
        self.stopped = False

    def poll(self) -> int | None:
        """What its launcher has said."""
        found: int | None = self.returncode
        return found

    def wait(self) -> int:
        """After it was killed: its launcher does so, and nothing is to be waited for."""
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        return int(self.returncode)

    def send_signal(self, sig: int, /) -> None:
        """Has it signalled."""
        self._line.send(worker=self._number, signal=int(sig))

    def end_group(self) -> None:
        """Its launcher has done so."""

    def is_stopped(self) -> bool:
        """Whether it was stopped a second ago."""
        return self.stopped


class RemoteSeat:
    """The line to it; see `ToWorker`."""

    def __init__(self, line: HostLine, number: int) -> None:
        """Takes the line to the worker's launcher.

        Args:
            line: To its launcher.
            number: Of the worker.
        """
        self._line, self._number = line, number

    def send(self, message: dict[str, Any]) -> None:
        """See `ToWorker`."""
        self._line.send(worker=self._number, say=message)

    def end(self) -> None:
        """See `ToWorker`."""
        self._line.send(worker=self._number, end=True)
