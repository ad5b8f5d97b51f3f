"""A pool of worker processes that play the ranks of many small jobs, so that torch is imported once.

Jobs of as many ranks that follow each other are one to paceline: joining takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.launch.pool import FORKS, PRELOADED
from tests.by_value import receive, send

# A rank that a test has ended is made anew without importing again what most tests' files import.
FORKS.set_forkserver_preload([*PRELOADED, "pytest", "hypothesis", "paceline.checkpoint.save", "paceline.train.loop"])


class RankError(AssertionError):
    """A rank raised or hung; carries the output of all."""


def _serve(pipe: Connection, device: str, around: Callable[[], AbstractContextManager[None]]) -> None:
    with around():
        _serve_on(pipe, device)


def _serve_on(pipe: Connection, device: str) -> None:
    import torch

    import paceline as pl

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: to look at it whenever memory is collected takes longer than most jobs
    while True:
        try:
            job = receive(pipe)
        except EOFError:
            return
        joins, environment, timeout, stacks, function, args = job
        if joins:
            with contextlib.suppress(Exception):
                pl.shutdown()
            os.environ.update(environment)
        # A hang is a failure, and its stacks are the evidence.
        with open(stacks, "w") as sink:
            faulthandler.enable(sink)  # so is a crash
            watch = threading.Timer(timeout, faulthandler.dump_traceback, (sink,))
            watch.daemon = True
            watch.start()
            try:
                pl.init(device=device, timeout=timeout)
                outcome: tuple[str, Any] = ("ok", function(*args))
            except BaseException:
                outcome = ("error", traceback.format_exc())
            finally:
                watch.cancel()
                faulthandler.disable()
        send(pipe, (*outcome, torch.distributed.is_initialized()))


class _Worker:
    """A process that plays one rank."""

    def __init__(self, device: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_serve, args=(theirs, device, around), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


_KEPT = 3
"""Jobs whose processes stay."""


class RankPool:
    """Runs a function as `n` ranks of one job and returns what each rank returned.

    The processes of a job wait for the next of as many ranks, while others run: joining takes longer than most tests.
    """

    def __init__(
        self, device: str = "cpu", around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        """Starts nothing yet.

        Args:
            device: What each rank computes on.
            around: Gives what a rank's whole life is inside of.
        """
        self._device, self._around = device, around
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ranks-")
        self._joined: dict[tuple[int, float, str], list[_Worker]] = {}
        """By ranks, time limit and transport of the job that they are in: last what was used last."""
        self._idle: list[_Worker] = []
        self._jobs = 0

    def __call__(
        self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 60, transport: str = "auto"
    ) -> list[Any]:
        job = (n, timeout, transport)
        joins = job not in self._joined
        self._joined[job] = workers = self._hire(n) if joins else self._joined.pop(job)
        self._jobs += joins
        stacks = [Path(self._folder.name, f"stacks{rank}") for rank in range(n)]
        for rank, worker in enumerate(workers):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(n),
                "PACELINE_RENDEZVOUS": f"file://{self._folder.name}/store{self._jobs}",
                "PACELINE_TRANSPORT": transport,
            }
            send(worker.pipe, (joins, environment, timeout, str(stacks[rank]), function, args))
        outcomes = self._outcomes(workers, timeout + 5)
        if not all(stays for _, _, stays in outcomes):
            self._idle += self._joined.pop(job)
        if all(kind == "ok" for kind, _, _ in outcomes):
            return [value for _, value, _ in outcomes]
        report = "\n".join(
            f"---- rank {rank}: {kind}\n{value}\n{stacks[rank].read_text()}"
            for rank, (kind, value, _) in enumerate(outcomes)
        )
        self.close()
        raise RankError(report)

    def _hire(self, n: int) -> list[_Worker]:
        """Workers for a job that is new: such as are in none, of one that was not asked for long, or new ones."""
        while len(self._joined) >= _KEPT:
            self._idle += self._joined.pop(next(iter(self._joined)))
        while len(self._idle) < n:
            self._idle.append(_Worker(self._device, self._around))
        hired, self._idle = self._idle[:n], self._idle[n:]
        return hired

    def _outcomes(self, workers: list[_Worker], timeout: float) -> list[tuple[str, Any, bool]]:
        """(kind, value, whether it is still in the job) of each rank."""
        outcomes: list[tuple[str, Any, bool]] = [("hung", "", False)] * len(workers)
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting and (ready := wait(list(waiting), timeout)):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = receive(pipe)
                except EOFError:
                    process = workers[rank].process
                    process.join(1)
                    outcomes[rank] = f"gone, exit status {process.exitcode}", "", False
        return outcomes

    def close(self) -> None:
        """Ends the workers."""
        every = [*self._idle, *(worker for workers in self._joined.values() for worker in workers)]
        for worker in every:
            worker.pipe.close()
        for worker in every:
            worker.end()
        self._idle.clear()
        self._joined.clear()


if __name__ == "__main__":
    sys.exit("this module is imported by the tests")
