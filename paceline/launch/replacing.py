"""A job that goes on without a worker that is lost, and with another one that takes its place."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.cores import threads_each
from paceline.launch.failure import read_failure
from paceline.launch.members import Members
from paceline.launch.process import Command
from paceline.launch.screen import show
from paceline.launch.seat import Place, place_message
from paceline.launch.seated import SeatedJob
from paceline.launch.temporary_folder import TemporaryFolder

SILENT_SECONDS = 120.0
"""After a loss, how long other ranks may compute before they notice it; those that do not are ended."""
STOPPED_SECONDS = 1.0
"""The same for one that is stopped, as by SIGSTOP."""
LATER_SECONDS = 2.0
"""After a loss, how long to wait at most for the others to do a step again before another worker is started: its start
takes the cores that they need."""
MEMORY, ROOM = Path("/dev/shm"), 1 << 30
"""Where ranks hand on what they hold, if so many bytes are free there; else in the temporary folder."""


def launch_replacing(
    command: Command,
    workers: int,
    least: int,
    spares: int,
    threads: int = 0,
    fits: Callable[[int], bool] = lambda ranks: True,
    planned: Callable[[dict[str, Any]], object] = lambda strategy: None,
) -> int:
    """Runs `command` as `launch` does, but goes on when a worker is lost: killed, stopped for good, or not heard of.

    The others then leave the job (`Seat.take_place`) and form another one, of spares and themselves. A new process is
    started for each that is lost; when it is ready and the job is smaller than it was, ranks are asked to leave once
    more. A worker that raises an exception is not lost: that ends the job, as its successor would raise it again.

    Args:
        command: Of every worker, which has a `Seat`.
        workers: Ranks of the job.
        least: Ranks with which it goes on at least.
        spares: Processes that wait to take the place of a lost one.
        threads: See `launch`.
        fits: Whether so many ranks can share the work.
        planned: Is told when workers have a strategy of their own (`Seat.has_planned`), which `fits` goes by then.

    Returns:
        As `launch`.

    Raises:
        UserError: The processes cannot be started.
    """
    with TemporaryFolder("job") as folder:
        members = Members(workers, least, fits)
        threads = threads_each(workers, threads)
        return ReplacingJob(folder.path, command, workers, threads, members, spares, planned).run()


class ReplacingJob(SeatedJob):
    """Workers that are ranks, or wait to be."""

    def __init__(
        self,
        folder: Path,
        command: Command,
        workers: int,
        threads: int,
        members: Members,
        spares: int,
        planned: Callable[[dict[str, Any]], object],
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: See `Job`, as for the next three.
            command: Of every worker.
            workers: Ranks that are on this host at first.
            threads: Of each.
            members: Who is which rank.
            spares: Processes on this host that wait at first.
            planned: See `launch_replacing`.
        """
        super().__init__(folder, command, workers, threads)
        self._members_now, self._spares, self._planned = members, spares, planned
        self._seen: set[int] = set()
        """Workers whose end was taken in."""
        self._asks: set[int] = set()
        """Workers that have asked for a place, at some time."""
        self._losses: set[int] = set()
        """Those that others went on after."""
        self._dismissed: set[int] = set()
        """Those that waited for a place when all were told to stop."""
        self._due: dict[int, float] = {}
        """Those for which another is to be started, and when at the latest."""
        self._work = ""
        self._broken_since: float | None = None
        self._fatal: set[int] = set()
        """Those that the job ends with, as too few are left."""
        self._memory: TemporaryFolder | None = None

    def run(self) -> int:
        """See `Job`."""
        try:
            return super().run()
        finally:
            self._forget_memory()

    def start(self) -> None:
        """See `Job`."""
        for _ in range(self._workers + self._spares):
            self._start_seated()
        self._give_places()

    def _take(self, number: int, message: dict[str, Any]) -> None:
        if "wait" in message:
            self._asks.add(number)
            self._members_now.wait(number, message["wait"], message["holds"], message["done"])
        elif "step" in message:
            self._members_now.step(message["step"])
            self._work = message["work"]
            self._forget_memory()
        elif "planned" in message:
            self._planned(message["planned"])

    def _give_places(self) -> None:
        members = self._members_now
        memory = str(self._folder if self._memory is None else self._memory.path)
        hosts = list(map(self._host_of, members.ranks))
        for rank, number in enumerate(members.ranks):
            self._rank_of[number] = rank
            place = Place(
                epoch=members.epoch,
                rank=rank,
                world_size=len(members.ranks),
                local_rank=hosts[:rank].count(hosts[rank]),
                local_world_size=hosts.count(hosts[rank]),
                threads=self._threads,
                rendezvous=self._rendezvous(members.epoch),
                memory=memory,
                work=self._work,
            )
            self._seats[number].send(place_message(place))

    # ---- what hosts make of it

    def _host_of(self, number: int) -> int:
        """Where a worker is."""
        return 0

    def _rendezvous(self, epoch: int) -> str:
        """Where the ranks of a job meet."""
        return f"file://{self._folder}/store-{epoch}"

    def _replace(self, lost: int) -> None:
        """Starts another worker in the place of one, where the job wants that many."""
        running = len(self._processes) - len(self._ended)
        if running < self._workers + self._spares:
            self._start_seated()

    # ---- what Job asks

    def _members(self) -> Sequence[int]:
        return self._members_now.ranks

    def _name(self, number: int) -> str:
        return f"rank {self._rank_of[number]}" if number in self._rank_of else f"spare {number}"

    def _failed(self, number: int) -> bool:
        return super()._failed(number) and number not in (self._losses - self._fatal) | self._dismissed

    def _tend(self) -> None:
        members = self._members_now
        for number in self._ended.keys() - self._seen:
            self._seen.add(number)
            # By a signal, and not one of those that end the job. What raises an exception would do so again.
            is_loss = self._processes[number].returncode < 0 and self._stop is None
            if is_loss and number not in self._ended_by_us:
                self._losses.add(number)
                self._tell_loss(number)
            members.end(number, number in self._losses)
        if members.is_over:
            for seat in self._seats.values():
                # Those that wait for a place end when their line does.
                seat.end()
        elif not any(map(self._failed, self._ended)):
            if self._stop is None and members.should_grow(self._coming()):
                for number in members.ranks:
                    self._seats[number].send({"leave": members.epoch})
            self._end_silent()
            # After a stop, too: those that are left save what they have.
            self._form()
            if self._stop is None:
                self._start_due()

    def _pass_on(self, stop: signal.Signals) -> None:
        for number, process in enumerate(self._processes):
            if number not in self._members_now.ranks and number not in self._ended:
                # It has nothing to save, and may not even have begun to grant stops.
                self._dismissed.add(number)
                process.send_signal(signal.SIGKILL)
        super()._pass_on(stop)

    def _tell_loss(self, number: int) -> None:
        members = self._members_now
        words = read_failure(self._failure_file(number), number, self._processes[number].returncode, 0.0).text
        of = f" of {len(members.ranks)}" if number in members.ranks else ""
        show(f"{self._name(number)}{of} is lost. {words}", warning=True)
        self._due[number] = time.monotonic() + LATER_SECONDS
        if of:
            # They need not compute to the end of what they will find out then.
            for other in members.ranks:
                self._seats[other].send({"broken": members.epoch, "why": f"{self._name(number)} is gone"})

    def _start_due(self) -> None:
        members = self._members_now
        for number, latest in list(self._due.items()):
            if members.is_settled or members.is_short or time.monotonic() > latest:
                del self._due[number]
                self._replace(number)

    def _end_silent(self) -> None:
        silent = self._members_now.silent
        if not silent:
            self._broken_since = None
            return
        now = time.monotonic()
        self._broken_since = self._broken_since or now
        for number in silent:
            process = self._processes[number]
            limit = STOPPED_SECONDS if process.is_stopped() else SILENT_SECONDS
            if now - self._broken_since > limit and process.poll() is None:
                process.send_signal(signal.SIGKILL)

    def _form(self) -> None:
        members = self._members_now
        ranks = members.form(self._coming())
        if ranks is None:
            return
        if not ranks:
            # What became of those that were lost is what the job ends with.
            self._fatal = set(members.lost or self._losses)
            return
        self._forget_memory()
        # A container may give next to nothing there.
        roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
        self._memory = TemporaryFolder("memory", MEMORY if roomy else None)
        self._give_places()

    def _coming(self) -> int:
        """Workers that have been started, or are about to be, and will ask for a place."""
        placed = self._asks | self._rank_of.keys() | self._ended.keys()
        return len(self._due) + sum(number not in placed for number in range(len(self._processes)))

    def _forget_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
