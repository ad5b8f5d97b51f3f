"""Starts one process per rank on this host and sees to it that they end together.

This process imports no torch and holds no state of the job: it starts, watches, forwards signals and reports.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from paceline.core.errors import UserError
from paceline.launch.cores import threads_each
from paceline.launch.failure import first_failure, memory_kills, read_failure
from paceline.launch.forking import ForkedProcess, Forks
from paceline.launch.process import Command, LocalProcess, Process
from paceline.launch.screen import show
from paceline.launch.seat import SEAT
from paceline.launch.status_line import clear_line
from paceline.launch.stop import STOPPABLE, STOPPING, Requests, handled_by
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.launch.worker import FAILURE_FILE, LAUNCHER
from paceline.launch.worker_output import WorkerOutput

GRACE_SECONDS = 3.0
"""Between asking the remaining workers to end after a failure and killing them."""
START_GRACE_SECONDS = 1.0
"""The same after a stop while they start: native code may keep them from hearing of it, as where ranks meet."""
POLL_SECONDS = 0.05


def launch(command: Command, workers: int, threads: int = 0) -> int:
    """Runs `command` in `workers` processes that form one job, and waits for them.

    Rank 0 has the screen; what other ranks write to stderr is shown behind `[rank k]`. If one fails, all are down
    within seconds and the report of the one that failed first stands last. SIGINT, SIGTERM and SIGHUP are passed on
    to workers that all grant them (`StopRequest`), so that they stop after the step they are in; others are ended
    within a second. A second such signal kills them.

    Args:
        command: Of every worker.
        workers: Number of processes, at least 1.
        threads: Threads per worker; 0: as OMP_NUM_THREADS says, else the cores shared out.

    Returns:
        Exit status: 0, that of the first failure, or 128 + the signal's number after a stop.

    Raises:
        UserError: The processes cannot be started.
    """
    with TemporaryFolder("job") as folder:
        return Job(folder.path, command, workers, threads_each(workers, threads)).run()


class Job:
    """The workers of one launch, by number: their ranks, where none is replaced."""

    def __init__(self, folder: Path, command: Command, workers: int, threads: int) -> None:
        """Starts nothing yet.

        Args:
            folder: For what ranks leave for each other and for this process.
            command: See `launch`.
            workers: Ranks of the job.
            threads: That each computes with.
        """
        self._folder, self._command, self._workers, self._threads = folder, command, workers, threads
        self._processes: list[Process] = []
        self._forks: Forks | None = None
        """What workers are forked from, once there is one, where they can be."""
        self._ended: dict[int, float] = {}
        self._ended_by_us: set[int] = set()
        self._requests = Requests()
        self._stop: signal.Signals | None = None
        """The request that was passed on."""
        self._stopped_early = False
        """It came before every worker granted such."""
        self._selector = selectors.DefaultSelector()
        self._memory_kills = memory_kills()

    def run(self) -> int:
        """Starts the workers and waits for them; returns the job's exit status."""
        try:
            with handled_by(self.request_stop, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.start()
                return self.wait()
        finally:
            self.kill()
            # A rank that was killed leaves its status line on the terminal.
            clear_line()

    def start(self) -> None:
        """Starts the workers."""
        for rank in range(self._workers):
            self._start_worker(
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self._workers),
                    "LOCAL_WORLD_SIZE": str(self._workers),
                    "OMP_NUM_THREADS": str(self._threads),
                    "PACELINE_RENDEZVOUS": f"file://{self._folder}/store",
                },
                has_screen=rank == 0,
            )
        if self._forks is not None:
            self._forks.close()

    def _start_worker(self, environment: Mapping[str, str], has_screen: bool, lines: Sequence[int] = ()) -> int:
        """Starts the next worker; returns its number.

        Args:
            environment: What it is told besides this process's own.
            has_screen: Whether it writes to this process's stdout and stderr.
            lines: Descriptors that it gets, if any, for its `Seat`.
        """
        number = len(self._processes)
        environment = {
            FAILURE_FILE: str(self._failure_file(number)),
            LAUNCHER: str(os.getpid()),
            STOPPABLE: str(self._stoppable_file(number)),
            **environment,
        }
        try:
            process = self._forked(environment, has_screen, lines) or LocalProcess(
                self._command.words,
                env={**os.environ, **environment, **({SEAT: ",".join(map(str, lines))} if lines else {})},
                stdin=subprocess.DEVNULL,
                stdout=None if has_screen else subprocess.DEVNULL,
                stderr=None if has_screen else subprocess.PIPE,
                # A group of its own: Ctrl-C reaches the launcher alone, and a kill reaches grandchildren.
                process_group=0,
                pass_fds=lines,
            )
        except OSError as error:
            raise UserError(f"cannot start worker {number} of {self._workers}: {error}") from None
        self._processes.append(process)
        if (end := process.end_descriptor()) is not None:
            self._listen(end, lambda: os.close(end))
        if process.stderr is not None:
            self._listen(process.stderr, WorkerOutput(process.stderr, lambda: self._name(number)).forward)
        return number

    def _forked(self, environment: Mapping[str, str], has_screen: bool, lines: Sequence[int]) -> ForkedProcess | None:
        """The next worker; None where it is to be started as a program."""
        if self._forks is None and self._command.imports and Forks.can_be():
            # Libraries look for how many threads there are when they are loaded.
            self._forks = Forks(self._command, {"OMP_NUM_THREADS": str(self._threads)})
        if self._forks is None:
            return None
        # A stop is heard of by what still imports only if that is a process of its own.
        return self._forks.start(environment, has_screen, lines, unless=self._meanwhile)

    def _meanwhile(self) -> bool:
        """Does what cannot wait while a worker is being started; whether it is not to be started after all."""
        return self._requests.first is not None

    def _listen(self, line: IO[bytes] | socket.socket | int, take: Callable[[], object]) -> None:
        """Calls `take` when something arrives, until it returns nothing that is true."""
        self._selector.register(line, selectors.EVENT_READ, take)

    def _hear_no_more(self, line: socket.socket) -> None:
        """Ends what `_listen` began, if it has not ended itself; before the line is closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(line)

    def request_stop(self, number: int, _: FrameType | None = None) -> None:
        """Signal handler; `wait` acts on it, as subprocess's own lock may be held here."""
        # Workers know an interrupt and a request to terminate; a closed terminal is the latter.
        self._requests.add(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def wait(self) -> int:
        """Exit status of the job, after every worker has ended."""
        deadline: float | None = None
        while len(self._ended) < len(self._processes):
            self._hear(POLL_SECONDS)
            self._reap()
            self._tend()
            if self._requests.again:
                self.kill()
            elif self._requests.first is not None and self._stop is None:
                self._pass_on(self._requests.first)
                if self._stopped_early:
                    deadline = time.monotonic() + START_GRACE_SECONDS
            if deadline is None and any(self._failed(rank) for rank in self._ended):
                deadline = time.monotonic() + GRACE_SECONDS
                if self._stop is None:
                    self._send(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
        while self._hear(0):
            pass
        return self._status()

    def kill(self) -> None:
        """Ends every worker that still runs at once, even one that ignores signals."""
        if self._forks is not None:
            self._forks.close()
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._reap()

    def _name(self, number: int) -> str:
        """What a worker is called before what it writes."""
        return f"rank {number}"

    def _rank(self, number: int) -> int:
        """Which rank a worker is, or was last."""
        return number

    def _tend(self) -> None:
        """Called some twenty times a second while workers run."""

    def _members(self) -> Sequence[int]:
        """Numbers of the workers that are the job's ranks."""
        return range(len(self._processes))

    def _failure_file(self, rank: int) -> Path:
        return self._folder / f"failure-{rank}.json"

    def _stoppable_file(self, rank: int) -> Path:
        return self._folder / f"stoppable-{rank}"

    def _pass_on(self, stop: signal.Signals) -> None:
        """Asks the workers to stop, or to end where some would not hear or grant it yet."""
        self._stop = stop
        self._stopped_early = not all(self._stoppable_file(number).exists() for number in self._members())
        if self._stopped_early:
            show("\nstopping", warning=True)
            # Not an interrupt, which imports that are under way show the traceback of.
            self._send(signal.SIGTERM)
            return
        show(STOPPING, warning=True)
        for process in self._processes:
            process.send_signal(stop)
            # One that was stopped, as by SIGSTOP, could neither grant it nor take part in the step that others are in.
            process.send_signal(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        """Signals every worker that still runs, and remembers that its end is no news."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self._ended_by_us.add(rank)
                process.send_signal(number)

    def _reap(self) -> None:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = time.monotonic()
                process.end_group()

    def _failed(self, rank: int) -> bool:
        """Whether a worker that has ended did so neither well nor as it was asked to."""
        well = {0} if self._stop is None else {0, 128 + self._stop, -self._stop}
        return self._processes[rank].returncode not in well

    def _status(self) -> int:
        statuses = [process.returncode for process in self._processes]
        failures = [
            read_failure(self._failure_file(rank), self._rank(rank), status, self._ended[rank])
            for rank, status in enumerate(statuses)
            if self._failed(rank) and (rank not in self._ended_by_us or self._tells_a_failure(rank))
        ]
        if failures:
            first = first_failure(failures)
            if first.exit_status == 128 + signal.SIGPIPE:
                # Nobody reads what rank 0 writes, and wants to read no more: `| head -1` is no mistake.
                return first.exit_status
            show(first.describe(len(self._members()), memory_kills() - self._memory_kills), warning=True)
            return first.exit_status
        return 128 + self._stop if self._stop is not None and any(statuses) else 0

    def _tells_a_failure(self, rank: int) -> bool:
        """Whether a worker that was asked to end failed before it was; amid imports an end may look like a failure."""
        return not self._stopped_early and self._failure_file(rank).exists()

    def _hear(self, timeout: float) -> bool:
        """Takes in what workers write, waiting for it up to `timeout` seconds; was there any?"""
        if not self._selector.get_map():
            time.sleep(timeout)
            return False
        ready = self._selector.select(timeout)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        return bool(ready)
