"""Starts one process per rank on this host and sees to it that they end together.

This process imports no torch and holds no state of the job: it starts, watches, forwards signals and reports.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from paceline.errors import UserError
from paceline.train.failure import first_failure, memory_kills, read_failure
from paceline.train.screen import show
from paceline.train.stop import STOPPING

GRACE_SECONDS = 3.0
"""Between asking the remaining workers to end after a failure and killing them."""
POLL_SECONDS = 0.05
FOLDER_PREFIX = "paceline-job-"


def job_in_environment(environment: Mapping[str, str]) -> int | None:
    """Number of ranks of the job that torchrun, Slurm or this launcher put this process into; None outside of one."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and size in environment:
            if rank == "SLURM_PROCID" and "SLURM_STEP_NODELIST" not in environment:
                continue
            try:
                return int(environment[size])
            except ValueError:
                raise UserError(f"{size}: expected a whole number, got {environment[size]!r}") from None
    return None


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(threads: int, local_ranks: int) -> int:
    """`threads`, or with 0 the cores shared out among the ranks of this host, at least one each."""
    return threads or max(1, available_cores() // local_ranks)


def launch(command: Sequence[str], workers: int, threads: int = 0) -> int:
    """Runs `command` in `workers` processes that form one job, and waits for them.

    Rank 0 has the screen; what other ranks write to stderr is shown behind `[rank k]`. If one fails, all are down
    within seconds and the report of the one that failed first stands last. SIGINT, SIGTERM and SIGHUP are
    passed on, so that the workers stop after the step they are in; a second SIGINT kills them.

    Args:
        command: Program and arguments of every worker.
        workers: Number of processes, at least 1.
        threads: Threads per worker; 0 shares the cores out.

    Returns:
        Exit status: 0, that of the first failure, or 128 + the signal's number after a stop.

    Raises:
        UserError: The processes cannot be started.
    """
    cores = available_cores()
    if workers * max(threads, 1) > cores:
        show(
            f"warning: {workers} workers of {max(threads, 1)} threads share {cores} cores, which is slower than "
            f"--workers {max(1, cores // max(threads, 1))}",
            warning=True,
        )
    _remove_abandoned_folders()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    with (folder / "unlocked").open("w") as lock:
        # Held for life, by the kernel: a folder whose lock is free belongs to a launcher that was killed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "unlocked").rename(folder / "lock")
        job = _Job(folder)
        try:
            with _stop_signals_to(job):
                job.start(command, workers, threads_per_rank(threads, workers))
                return job.wait()
        finally:
            job.kill()
            shutil.rmtree(folder, ignore_errors=True)


class _Job:
    """The workers of one launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, float] = {}
        self._ended_by_us: set[int] = set()
        self._stop_requests: list[signal.Signals] = []
        self._stop_forwarded = False
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}
        self._memory_kills = memory_kills()

    def start(self, command: Sequence[str], workers: int, threads: int) -> None:
        """Starts the workers."""
        for rank in range(workers):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_WORLD_SIZE": str(workers),
                "OMP_NUM_THREADS": str(threads),
                "PACELINE_RENDEZVOUS": f"file://{self._folder}/store",
                "PACELINE_FAILURE_FILE": str(self._failure_file(rank)),
                "PACELINE_LAUNCHER": str(os.getpid()),
            }
            try:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else subprocess.PIPE,
                    # A group of its own: Ctrl-C reaches the launcher alone, and a kill reaches grandchildren.
                    process_group=0,
                )
            except OSError as error:
                raise UserError(f"cannot start worker {rank} of {workers}: {error}") from None
            self._processes.append(process)
            if process.stderr is not None:
                os.set_blocking(process.stderr.fileno(), False)
                self._selector.register(process.stderr, selectors.EVENT_READ, rank)

    def request_stop(self, number: int, _: FrameType | None = None) -> None:
        """Signal handler; `wait` acts on it, as subprocess's own lock may be held here."""
        # Workers know an interrupt and a request to terminate; a closed terminal is the latter.
        self._stop_requests.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def wait(self) -> int:
        """Exit status of the job, after every worker has ended."""
        deadline: float | None = None
        while len(self._ended) < len(self._processes):
            self._forward_output(POLL_SECONDS)
            self._reap()
            self._forward_stop()
            if deadline is None and any(self._failed(rank) for rank in self._ended):
                deadline = time.monotonic() + GRACE_SECONDS
                if not self._stop_requests:
                    self._send(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
        while self._forward_output(0):
            pass
        return self._status()

    def kill(self) -> None:
        """Ends every worker that still runs at once, whatever it does."""
        self._send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._reap()

    def _failure_file(self, rank: int) -> Path:
        return self._folder / f"failure-{rank}.json"

    def _forward_stop(self) -> None:
        if self._stop_requests.count(signal.SIGINT) > 1:
            self.kill()
        elif self._stop_requests and not self._stop_forwarded:
            self._stop_forwarded = True
            show(STOPPING, warning=True)
            for process in self._processes:
                process.send_signal(self._stop_requests[0])

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
                # What it started in turn lives in its group and must not outlive it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _failed(self, rank: int) -> bool:
        """Whether a worker that has ended did so neither well nor as it was asked to."""
        well = {0, *(status for stop in self._stop_requests[:1] for status in (128 + stop, -stop))}
        return self._processes[rank].returncode not in well

    def _status(self) -> int:
        statuses = [process.returncode for process in self._processes]
        failures = [
            read_failure(self._failure_file(rank), rank, status, self._ended[rank])
            for rank, status in enumerate(statuses)
            if self._failed(rank) and (rank not in self._ended_by_us or self._failure_file(rank).exists())
        ]
        if failures:
            first = first_failure(failures)
            show(first.describe(len(statuses), memory_kills() - self._memory_kills), warning=True)
            return first.exit_status
        return 128 + self._stop_requests[0] if self._stop_requests and any(statuses) else 0

    def _forward_output(self, timeout: float) -> bool:
        """Shows what other ranks than 0 wrote to stderr, waiting for it up to `timeout` seconds; was there any?"""
        if not self._selector.get_map():
            time.sleep(timeout)
            return False
        ready = self._selector.select(timeout)
        for key, _ in ready:
            rank = int(key.data)
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            *lines, rest = (self._partial.pop(rank, b"") + data).split(b"\n")
            if data:
                self._partial[rank] = rest
            else:
                self._selector.unregister(key.fileobj)
                lines += [rest] if rest else []
            for line in lines:
                show(f"[rank {rank}] {line.decode(errors='replace')}", warning=True)
        return bool(ready)


@contextlib.contextmanager
def _stop_signals_to(job: _Job) -> Iterator[None]:
    """Inside, signals that would end this process ask the job to stop."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, job.request_stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_abandoned_folders() -> None:
    """Removes what launchers that were killed left in the temporary folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            with (folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Another user's, or a job that runs.
            continue
