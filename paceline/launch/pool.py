"""Processes that play the ranks of one job on this machine, for commands that compare or time something."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Self

from paceline.core.errors import UserError
from paceline.launch.failure import Failure, first_failure, read_failure
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.launch.worker import describe_failure

SPAWN = multiprocessing.get_context("spawn")
FORKS = multiprocessing.get_context("forkserver")
# Ranks then begin with the engine imported, and what the first optimizer imports of torch. What they are forked from
# may not have computed yet: its threads do not survive a fork.
PRELOADED = ["torch", "torch._dynamo", "paceline.engine.api"]
FORKS.set_forkserver_preload(PRELOADED)


STACKS_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""Between the failure of one rank and the end of those that may wait for it."""


_LONGEST_FOLDER = 72
"""Bytes of the temporary folder's path: the forking process has a socket 32 further down, whose address holds 107."""


def _may_fork() -> bool:
    return len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER


class RanksFailed(Exception):
    """A rank raised, died or hung. `failure` is the one that began it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure

    @property
    def summary(self) -> str:
        """The last line of the traceback: the exception itself."""
        return self.failure.text.rstrip().rpartition("\n")[2]


class RankPool:
    """Runs functions as `n` ranks of one job on this machine.

    No process outlives this one, however it ends. Ctrl-C interrupts this process alone; leaving the `with` block then
    ends the ranks. After a failure that was not the same on every rank, the next call starts new processes.
    """

    def __init__(self, n: int, threads: int, fresh: bool = False) -> None:
        """Starts nothing yet.

        Args:
            n: Number of ranks.
            threads: Threads that each rank computes with.
            fresh: Whether ranks start as programs do, sharing no memory and with `threads` for every thread of theirs,
                so that what is measured is what users get. Else they start faster.
        """
        self._n, self._threads = n, threads
        self._context = SPAWN if fresh or not _may_fork() else FORKS
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: TemporaryFolder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, limit: float) -> list[Any]:
        """Calls `function(*args)` on every rank.

        Args:
            function: Importable; with several ranks it calls `pl.init()` itself.
            args: Picklable.
            limit: Seconds until ranks that have not answered are ended.

        Returns:
            What each rank returned, in rank order.

        Raises:
            UserError: A rank raised one.
            RanksFailed: A rank raised something else, died, or gave no answer in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((limit, function, args))
        answers = self._answers(limit)
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        if not failures:
            return [answers[rank] for rank in range(self._n)]
        alike = len(failures) == self._n and len({failure.text for failure in failures}) == 1
        if not alike or not all(process.is_alive() for process in self._processes):
            # They are not in one place any more, so what they would send each other next does not match.
            self.close()
        failure = first_failure(failures)
        if failure.user_error:
            raise UserError(failure.text)
        raise RanksFailed(failure)

    def _answers(self, limit: float) -> dict[int, Any]:
        """What ranks answered. After a failure the others have a little time to answer too."""
        answers: dict[int, Any] = {}
        # A rank that is late writes its stacks at its own limit.
        deadline = time.monotonic() + limit + STACKS_SECONDS
        while len(answers) < self._n:
            waiting = {self._pipes[rank]: rank for rank in range(self._n) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    self._processes[rank].join()
                    status = self._processes[rank].exitcode
                    answers[rank] = read_failure(Path(os.devnull), rank, status, time.monotonic())
            if not ready:
                if not any(isinstance(answer, Failure) for answer in answers.values()):
                    late = [rank for rank in range(self._n) if rank not in answers]
                    answers |= dict.fromkeys(late, self._late(late, limit))
                    self.close()
                return answers
            if any(isinstance(answer, Failure) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _late(self, ranks: Sequence[int], limit: float) -> Failure:
        assert self._folder is not None
        stacks = [f"rank {rank}:\n{self._stacks(rank)}" for rank in ranks]
        who = " and ".join(f"rank {rank}" for rank in ranks)
        return Failure(ranks[0], time.monotonic(), 1, "\n".join([*stacks, f"{who} gave no answer within {limit:g} s"]))

    def _stacks(self, rank: int) -> str:
        assert self._folder is not None
        written = Path(self._folder.path, f"stacks-{rank}").read_text()
        return written or "(no stacks: native code keeps the interpreter's lock)\n"

    def _start(self) -> None:
        self._folder = TemporaryFolder("ranks")
        forked = self._context is FORKS
        if forked:
            import_ahead()
        # Not where a process that has it so forks them: it may have to finish its imports first.
        with contextlib.nullcontext() if forked else _blocked_interrupts():
            for rank in range(self._n):
                ours, theirs = self._context.Pipe()
                environment = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self._n),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(self._n),
                    "PACELINE_RENDEZVOUS": f"file://{self._folder.path}/store",
                    "OMP_NUM_THREADS": str(self._threads),
                }
                stacks = f"{self._folder.path}/stacks-{rank}"
                process = self._context.Process(target=_serve, args=(theirs, rank, environment, self._threads, stacks))
                process.daemon = True
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        for pipe in self._pipes:
            # Time counts from when every rank is ready to work.
            with contextlib.suppress(EOFError):
                pipe.recv()

    def close(self) -> None:
        """Ends the processes at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
        if self._folder is not None:
            self._folder.close()


def import_ahead() -> None:
    """Begins to import what ranks need, in the process that they are forked from, while this one goes on."""
    if _may_fork():
        with _blocked_interrupts():
            forkserver.ensure_running()
        atexit.unregister(_end_forking)
        atexit.register(_end_forking)


def _end_forking() -> None:
    """Ends the process that ranks are forked from, which would finish its imports first, and keep the screen."""
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """What is started inside never sees SIGINT, from its first moment: Ctrl-C is this process's to answer."""
    # Starting the tracker would unblock it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, rank: int, environment: dict[str, str], threads: int, stacks: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    folder = Path(stacks).parent
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    faulthandler.enable()
    gc.freeze()  # what was imported is no garbage, now or later
    # Only the pipe raises outside of the function: it is closed when the parent ends.
    with contextlib.suppress(EOFError, OSError), open(stacks, "w") as sink:
        pipe.send(None)
        while True:
            limit, function, args = pipe.recv()
            # A hang is a failure, and its stacks are the evidence. A thread of Python writes them: faulthandler's own
            # timer reads frames that are in motion, which can end the process.
            watch = threading.Timer(limit, faulthandler.dump_traceback, (sink,))
            watch.daemon = True
            watch.start()
            try:
                answer = function(*args)
            except (Exception, SystemExit) as error:
                answer = describe_failure(error, rank)  # type: ignore[arg-type]
            finally:
                watch.cancel()
            if isinstance(answer, Failure):
                # An engine that the exception left behind ends its threads and connections here.
                gc.collect()
            pipe.send(answer)
    _end_abandoned(folder)


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end_abandoned(folder)


def _end_abandoned(folder: Path) -> NoReturn:
    """Ends a rank whose parent is gone, and could not remove what it had made."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
