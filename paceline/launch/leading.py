"""The launcher of the first of several hosts: it says who is which rank on all of them."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import UserError
from paceline.launch.cores import threads_each
from paceline.launch.failure import Failure, write_failure
from paceline.launch.host_line import HostLine
from paceline.launch.host_meeting import JOINING_SECONDS, PATIENT_SECONDS, HostMeeting, LeadingEnd
from paceline.launch.members import Members
from paceline.launch.process import Command
from paceline.launch.remote import RemoteProcess, RemoteSeat
from paceline.launch.replacing import ReplacingJob
from paceline.launch.screen import show
from paceline.launch.stop import ended_at_once
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.launch.workers import POLL_SECONDS


def lead(
    meeting: HostMeeting,
    command: Command,
    workers: int,
    least: int,
    spares: int,
    threads: int,
    fits: Callable[[int], bool],
    planned: Callable[[dict[str, Any]], object],
) -> int:
    """Runs `command` on all hosts as `launch_replacing` does on one; the other hosts' launchers `follow`.

    A host whose launcher is gone, or not heard of for `CUT_OFF_SECONDS`, is lost with all its workers, who have ended
    themselves by then. It may come again. What is left of the hosts goes on only if it is half of them or more.

    Args:
        meeting: Of the hosts.
        command: See `launch_replacing`, as for the next.
        workers: On each host.
        least: Ranks of the whole job.
        spares: On each host.
        threads: See `launch`.
        fits: See `launch_replacing`.
        planned: See `launch_replacing`.

    Raises:
        UserError: Not all hosts come, or processes cannot be started.
    """
    with ended_at_once():
        meeting.open_store()
    end = LeadingEnd(meeting)
    with TemporaryFolder("job") as folder:
        threads = threads_each(workers, threads)
        job = _LeadingJob(folder.path, command, workers, threads, least, spares, fits, planned, end)
        status = 1
        try:
            status = job.run()
        except UserError:
            status = 2
            raise
        except SystemExit as stopped:
            status = int(stopped.code or 0)
            raise
        finally:
            for line in end.lines.values():
                line.send(over=status)
            end.close()
    return status


class _LeadingJob(ReplacingJob):
    """Workers on several hosts."""

    def __init__(
        self,
        folder: Path,
        command: Command,
        workers: int,
        threads: int,
        least: int,
        spares: int,
        fits: Callable[[int], bool],
        planned: Callable[[dict[str, Any]], object],
        end: LeadingEnd,
    ) -> None:
        self._hosts = 1 + len(end.missing)
        members = Members(workers * self._hosts, least, fits, self._host_of)
        super().__init__(folder, command, workers, threads, members, spares, planned)
        self._end = end
        self._where: list[int] = []
        """The host of each worker."""

    def start(self) -> None:
        """Waits for the other hosts, then starts the workers on all."""
        deadline = time.monotonic() + JOINING_SECONDS
        said = time.monotonic()
        while self._end.missing or not self._end.lines:
            self._welcome(starts=False)
            if self._requests.first is not None:
                raise SystemExit(128 + self._requests.first)
            names = f"host {', '.join(map(str, self._end.missing))} of {self._hosts}"
            if time.monotonic() > deadline:
                raise UserError(f"{names} did not come within {JOINING_SECONDS:g} s: start this command on every host")
            if time.monotonic() > said + PATIENT_SECONDS:
                said = float("inf")
                show(f"waiting for {names}", warning=True)
            self._hear(POLL_SECONDS)
            for host in self._lost():
                self._forget_host(host)
        for count in (self._workers, self._spares):
            for host in range(self._hosts):
                for _ in range(count):
                    self._start_on(host)
        self._give_places()

    def _start_on(self, host: int) -> None:
        self._where.append(host)
        if host == 0:
            self._start_seated()
            return
        number, line = len(self._processes), self._end.lines[host]
        self._processes.append(RemoteProcess(line, number))
        self._seats[number] = RemoteSeat(line, number)
        line.send(start=number)

    # ---- what a job of one host does otherwise

    def _host_of(self, number: int) -> int:
        return self._where[number]

    def _rendezvous(self, epoch: int) -> str:
        return self._end.store_for(epoch)

    def _replace(self, lost: int) -> None:
        host = self._where[lost]
        running = sum(where == host and number not in self._ended for number, where in enumerate(self._where))
        if (host == 0 or host in self._end.lines) and running < self._workers + self._spares:
            self._start_on(host)

    def _meanwhile(self) -> bool:
        # To import torch takes longer than a host is silent that is there, where disks are slow or cores busy.
        for line in self._end.lines.values():
            line.give_sign()
        return super()._meanwhile()

    def _forget_memory(self) -> None:
        if self._memory is not None:
            for line in self._end.lines.values():
                line.send(forget=True)
        super()._forget_memory()

    def _lost(self) -> list[int]:
        """Hosts that are not heard of any more; the others are given signs of life."""
        for line in self._end.lines.values():
            line.tend()
        return [host for host, line in self._end.lines.items() if line.is_lost]

    def _forget_host(self, host: int) -> None:
        self._hear_no_more(self._end.lines[host].connection)
        self._end.drop(host)

    def _tend(self) -> None:
        for host in self._lost():
            self._lose(host)
        # The end of a host's workers is taken in before others are started there.
        self._reap()
        super()._tend()
        self._welcome(starts=self._stop is None and not self._members_now.is_over)

    # ---- other hosts

    def _welcome(self, starts: bool) -> None:
        for host in self._end.come():
            line = self._end.lines[host]
            line.send(sizes=[self._workers, self._spares])
            self._listen(line.connection, functools.partial(self._hear_from_host, host, line))
            if starts:
                show(f"host {host} of {self._hosts} is there again")
                for _ in range(self._workers + self._spares):
                    self._start_on(host)

    def _hear_from_host(self, host: int, line: HostLine) -> bool:
        for message in line.receive():
            self._hear_host(host, message)
        return not line.is_lost

    def _hear_host(self, host: int, message: dict[str, Any]) -> None:
        if "sign" in message:
            for number in self._workers_of(host):
                self._remote(number).stopped = number in message["sign"]["stopped"]
        elif "stop" in message:
            if self._requests.first is None:
                self._requests.add(message["stop"])
        elif (number := message.get("worker", -1)) in self._workers_of(host):
            if "said" in message:
                self._take(number, message["said"])
            elif "grants" in message:
                with contextlib.suppress(OSError):
                    self._stoppable_file(number).touch()
            elif "ended" in message:
                if message["failure"] is not None:
                    failure = msgspec.convert(message["failure"], Failure)
                    ago = time.monotonic() + failure.time
                    write_failure(self._failure_file(number), replace(failure, time=ago))
                self._remote(number).returncode = message["ended"]

    def _workers_of(self, host: int) -> list[int]:
        return [number for number, where in enumerate(self._where) if where == host and number not in self._ended]

    def _remote(self, number: int) -> RemoteProcess:
        process = self._processes[number]
        assert isinstance(process, RemoteProcess)
        return process

    def _lose(self, host: int) -> None:
        """Takes all workers of a host for lost."""
        self._forget_host(host)
        why = f"host {host} of {self._hosts} is gone or cut off"
        lost = self._workers_of(host)
        for number in lost:
            failure = Failure(self._rank(number), time.monotonic(), 128 + signal.SIGKILL, f"Its {why}.")
            write_failure(self._failure_file(number), failure)
            self._remote(number).returncode = -signal.SIGKILL
        members = self._members_now
        if 2 * (1 + len(self._end.lines)) < self._hosts:
            show(f"{why}: fewer than half of the hosts are left, which do not go on without the others", warning=True)
            self._fatal = set(lost or self._losses)
        ranks = [str(self._rank_of[number]) for number in lost if number in members.ranks and number in self._rank_of]
        if ranks:
            # Nothing tells those who wait for them: their connections are silent, and not closed.
            words = f"rank {', '.join(ranks)} is gone: {why}"
            for number in set(members.ranks).difference(lost):
                self._seats[number].send({"broken": members.epoch, "why": words})
