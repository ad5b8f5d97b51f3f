"""The launcher of another host than the first: it starts, signals and ends workers as the leading one says."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.launch.cores import threads_each
from paceline.launch.failure import read_failure
from paceline.launch.host_line import HostLine
from paceline.launch.host_meeting import JOINING_SECONDS, PATIENT_SECONDS, HostMeeting, reach_leader
from paceline.launch.process import Command
from paceline.launch.screen import show
from paceline.launch.seated import SeatedJob
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.launch.workers import POLL_SECONDS

_PAUSE_SECONDS = 0.2
_LONGEST = 1 << 14
"""Characters of a failure's report that are handed on."""


def follow(meeting: HostMeeting, command: Command, workers: int, spares: int, threads: int) -> int:
    """Looks after this host's workers until the job is over; returns its exit status.

    Where the leading launcher is gone, or not heard of for `FENCED_SECONDS`, the workers here are ended, as others will
    go on without them; then it is looked for again.

    Args:
        meeting: Of the hosts.
        command: See `launch_replacing`.
        workers: On each host.
        spares: On each host.
        threads: See `launch`.

    Raises:
        UserError: The leading launcher cannot be reached, or starts others on each host.
    """
    with TemporaryFolder("job") as folder:
        return _FollowingJob(folder.path, command, workers, threads_each(workers, threads), spares, meeting).run()


class _FollowingJob(SeatedJob):
    """The workers of this host, whose numbers at the leading launcher are others than here."""

    def __init__(
        self, folder: Path, command: Command, workers: int, threads: int, spares: int, meeting: HostMeeting
    ) -> None:
        super().__init__(folder, command, workers, threads)
        self._spares, self._meeting = spares, meeting
        self._line: HostLine | None = None
        self._number_there: dict[int, int] = {}
        """Of workers whose end the leading launcher is still to be told."""
        self._granting: set[int] = set()
        self._memory: TemporaryFolder | None = None
        self._over: int | None = None
        self._has_told_stop = False

    def run(self) -> int:
        """See `Job`."""
        try:
            return super().run()
        finally:
            self._forget_memory()
            if self._line is not None:
                self._line.close()

    def start(self) -> None:
        """None yet: the leading launcher says when."""

    def wait(self) -> int:
        """Exit status of the whole job, when the leading launcher says that it is over."""
        alone = time.monotonic()
        said = False
        while self._over is None:
            stop = self._requests.first
            if self._requests.again or (stop is not None and self._line is None):
                return 128 + (stop or 0)
            if self._line is not None:
                self._follow(self._line)
                alone, said = time.monotonic(), False
            elif time.monotonic() > alone + JOINING_SECONDS:
                raise UserError(
                    f"the launcher of host 0 was not reached within {JOINING_SECONDS:g} s: see that it runs, that no "
                    f"other launcher is host {self._meeting.host}, and that hosts reach each other at any port"
                )
            elif not said and time.monotonic() > alone + PATIENT_SECONDS:
                said = True
                here, where = f"host {self._meeting.host} of {self._meeting.hosts}", self._meeting.place
                show(f"{here} waits for the launcher of host 0, at {where}", warning=True)
            elif (line := reach_leader(self._meeting)) is not None:
                self._line = line
                self._listen(line.connection, lambda: self._hear_leader(line))
            else:
                time.sleep(_PAUSE_SECONDS)
        return self._over

    def _follow(self, line: HostLine) -> None:
        """Hands on what happens here, and notices when nobody hears it."""
        self._hear(POLL_SECONDS)
        self._reap()
        for local, number in list(self._number_there.items()):
            if local not in self._granting and self._stoppable_file(local).exists():
                self._granting.add(local)
                line.send(worker=number, grants=True)
            if local in self._ended:
                line.send(worker=number, ended=self._processes[local].returncode, failure=self._failure(local))
                del self._number_there[local]
        if self._requests.first is not None and not self._has_told_stop:
            self._has_told_stop = True
            line.send(stop=int(self._requests.first))
        line.tend(stopped=self._stopped())
        if line.is_lost and self._over is None:
            if self._number_there:
                show("host 0 is gone or cut off: the workers here end, as others go on without them", warning=True)
            self.kill()
            self._number_there.clear()
            self._hear_no_more(line.connection)
            line.close()
            self._line = None

    def _meanwhile(self) -> bool:
        if self._line is not None:
            self._line.give_sign(stopped=self._stopped())
        return super()._meanwhile()

    def _stopped(self) -> list[int]:
        return [number for local, number in self._number_there.items() if self._processes[local].is_stopped()]

    def _hear_leader(self, line: HostLine) -> bool:
        for message in line.receive():
            self._obey(message)
        return True

    def _obey(self, message: dict[str, Any]) -> None:
        if "sizes" in message:
            if message["sizes"] != [self._workers, self._spares]:
                (workers, spares), own = message["sizes"], f"--workers {self._workers} --spares {self._spares}"
                raise UserError(
                    f"host 0 was started with --workers {workers} --spares {spares}, host {self._meeting.host} with "
                    f"{own}: both are those of each host, so start the same command on every one"
                )
        elif "start" in message:
            self._number_there[self._start_seated()] = message["start"]
        elif "over" in message:
            self._over = message["over"]
        elif "forget" in message:
            self._forget_memory()
        elif "worker" in message:
            here = [local for local, number in self._number_there.items() if number == message["worker"]]
            for local in here:
                if "say" in message:
                    self._seats[local].send(self._here(local, message["say"]))
                elif "end" in message:
                    self._seats[local].end()
                elif "signal" in message:
                    self._ended_by_us.add(local)
                    self._processes[local].send_signal(message["signal"])

    def _here(self, local: int, said: dict[str, Any]) -> dict[str, Any]:
        """What a worker is told, as it is on this host."""
        if "place" not in said:
            return said
        place = {**said["place"], "threads": self._threads}
        self._rank_of[local] = place["rank"]
        path = Path(place["memory"])
        if self._memory is None or self._memory.path != path:
            self._forget_memory()
            # Where hosts share it, it is there. Where it cannot be, ranks that write to it will say so.
            with contextlib.suppress(OSError):
                self._memory = TemporaryFolder("memory", path=path)
        return {"place": place}

    def _take(self, number: int, message: dict[str, Any]) -> None:
        if self._line is not None and number in self._number_there:
            self._line.send(worker=self._number_there[number], said=message)

    def _failure(self, local: int) -> dict[str, Any] | None:
        """What the report of a worker that failed says, with times of this host's clock as seconds since."""
        if not self._failure_file(local).exists():
            return None
        status, now = self._processes[local].returncode, time.monotonic()
        failure = read_failure(self._failure_file(local), self._rank(local), status, now)
        return asdict(replace(failure, text=failure.text[-_LONGEST:], time=failure.time - now))

    def _name(self, number: int) -> str:
        return f"rank {self._rank_of[number]}" if number in self._rank_of else f"host {self._meeting.host}"

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
