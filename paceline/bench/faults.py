"""`paceline bench faults`: what a killed worker costs a training, beside torchrun's restarts."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.bench.recovery_log import LoggedStep, RecoveryLog, read_log
from paceline.bench.subject_line import progress
from paceline.command_line.json_file import JsonFile
from paceline.core.errors import UserError
from paceline.launch.marked import marked
from paceline.launch.seat import SEAT
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.measuring.results import half_spread, write_json
from paceline.train.interruption import PARTS
from paceline.train.run_folder import METRICS

_MARK = "PACELINE_BENCH_MARK"
_PATIENCE_SECONDS = 180.0


@dataclass(frozen=True)
class FaultsBench:
    """Time between two steps of a training when a worker is killed with -9, and how much of all time is training."""

    kills: int = 8
    """Workers to kill, one after the other, in each training."""
    every: float = 15.0
    """Seconds from one step after a kill to the next kill."""
    workers: int = 2
    """Ranks of each training, on this machine."""
    preset: str = "tiny"
    """Model preset to train."""
    json: JsonFile = ""
    """Where to write machine, versions, command and figures; - prints them, and all else goes to stderr."""


@dataclass(frozen=True)
class Recovery:
    """How one system got over its kills.

    Attributes:
        system: What was done.
        kills: How many workers were killed.
        median_seconds: Between the last step of a job that lost a worker and the next job's first that was not done
            before, less a usual step of as many ranks as did that.
        spread_seconds: Half the distance between the quartiles of that.
        worst_seconds: The most.
        rejoins: How often ranks left a job between two steps, to form one with more of them.
        rejoin_seconds: As `median_seconds`, around a rejoin; None without any.
        rejoin_worst_seconds: The most.
        steps_repeated: Over all kills.
        goodput: Share of the time from the first step to the last in which steps were done for the first time.
        stopped: Share in which none was, from the last of a job that lost a worker to the next job's first of any kind,
            less a usual step.
        joining: The same around a rejoin.
        repeated: Share in which steps were done again.
        slower: Share that the other steps took beyond a usual one, as with fewer ranks or beside one that starts.
        parts: Median seconds of each part of going on after a kill (`paceline.train.interruption.PARTS`).
        rejoin_parts: The same of a rejoin.
    """

    system: str
    kills: int
    median_seconds: float
    spread_seconds: float
    worst_seconds: float
    rejoins: int
    rejoin_seconds: float | None
    rejoin_worst_seconds: float | None
    steps_repeated: int
    goodput: float
    stopped: float
    joining: float
    repeated: float
    slower: float
    parts: dict[str, float]
    rejoin_parts: dict[str, float]


def main(options: FaultsBench) -> list[Recovery]:
    """Trains with each system in turn, kills its workers, prints and writes the figures."""
    if options.workers < 2 or options.kills < 1:
        raise UserError("bench faults: expected at least 2 workers and 1 kill, as others go on without the killed one")
    rows: list[Recovery] = []
    failures: list[dict[str, object]] = []
    with TemporaryFolder("bench") as folder, progress() as report:
        for number, (system, arguments) in enumerate(_systems(options).items()):
            run = folder.path / str(number)
            report(f"{system}: starting")
            with _Training([*arguments, "--folder", str(run)], run, options.workers) as training:
                try:
                    training.wait_for_steps(options.every)
                    for kill in range(options.kills):
                        report(f"{system}: kill {kill + 1} of {options.kills}")
                        training.kill_one(options.workers)
                        training.wait_for_steps(options.every)
                except UserError as error:
                    report("")
                    print(f"{system}: after {len(training.kills)} kills {error}")
                    failures.append({"system": system, "kills": len(training.kills), "reason": str(error)})
                else:
                    rows.append(recovery(system, training.log(), training.kills))
            if options.json:  # each time, so that what one system does costs none of the others' figures
                write_json(options.json, rows, {"failures": failures} if failures else None)
    if rows:
        _print(rows)
    return rows


def recovery(system: str, log: RecoveryLog, kills: Sequence[float]) -> Recovery:
    """Figures from a run's log.

    Args:
        system: Its name.
        log: What the run has written.
        kills: When workers were killed, by the same clock.
    """
    steps, new = log.steps, log.new
    usual = _usual(steps)
    best = usual[max(usual)]

    def stall(at: float) -> float:
        before, after = _around(new, at)
        return max(0.0, after.at - before.at - usual[after.ranks] * (after.number - before.number))

    def share(times: Sequence[float]) -> float:
        gaps = {_around(steps, at) for at in times}
        return sum(max(0.0, after.at - before.at - usual[after.ranks]) for before, after in gaps) / whole

    rejoins = [at for at in log.rejoins if at < new[-1].at]
    stalls, joins = [stall(kill) for kill in kills], [stall(rejoin) for rejoin in rejoins]
    whole, again = steps[-1].at - steps[0].at, len(steps) - len(new)
    stopped, joining = share(kills), share(rejoins)
    goodput, repeated = best * (new[-1].number - new[0].number) / whole, best * again / whole
    return Recovery(
        system,
        len(kills),
        statistics.median(stalls),
        half_spread(stalls),
        max(stalls),
        len(joins),
        statistics.median(joins) if joins else None,
        max(joins, default=None),
        again,
        goodput,
        stopped,
        joining,
        repeated,
        1.0 - goodput - stopped - joining - repeated,
        _medians(log.after_losses),
        _medians(log.after_rejoins),
    )


def _around(steps: Sequence[LoggedStep], at: float) -> tuple[LoggedStep, LoggedStep]:
    """The last step of the job that was interrupted then, and the first of the next."""
    # A job may yet do a step of which the killed rank had done its part.
    return next(pair for pair in itertools.pairwise(steps) if pair[1].at > at and pair[1].job > pair[0].job)


def _usual(steps: Sequence[LoggedStep]) -> dict[int, float]:
    """Median seconds of a step, by how many ranks did it."""
    pairs = [pair for pair in itertools.pairwise(steps) if pair[0].ranks == pair[1].ranks]
    took = {ranks: [b.at - a.at for a, b in pairs if b.ranks == ranks] for ranks in {step.ranks for step in steps}}
    every = statistics.median(later.at - step.at for step, later in itertools.pairwise(steps))
    return {ranks: statistics.median(seconds) if seconds else every for ranks, seconds in took.items()}


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(each[part] for each in found) for part in PARTS} if found else {}


def _systems(options: FaultsBench) -> dict[str, list[str]]:
    usual = [
        *("--model.preset", options.preset, "--steps", "1000000", "--threads", "1", "--log.every", "1"),
        *("--log.events-every", "0", "--log.validate-every", "0"),
    ]
    often = ["--checkpoint.every", "2s"]
    ours = ["-m", "paceline", "train", "--workers", str(options.workers), *usual]
    agent = [*("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"), "--nproc-per-node"]
    return {
        "a spare, from memory": [*ours, "--spares", "1"],
        "fewer, from memory": [*ours, "--min-workers", str(options.workers - 1)],
        "a spare, zero 1, from checkpoints": [*ours, *often, "--spares", "1", "--strategy.zero", "1"],
        "torchrun restarts, from checkpoints": [
            *(*agent, str(options.workers), "-m", "paceline", "train", *usual, *often, "--resume", "auto")
        ],
    }


class _Training:
    """A training whose workers are killed; nothing of it is left when the block ends."""

    def __init__(self, arguments: Sequence[str], run: Path, ranks: int) -> None:
        self._ranks = ranks
        self._run, self._mark = run, uuid.uuid4().hex
        self._arguments = arguments
        self._job, self.kills = 0, list[float]()

    def __enter__(self) -> Self:
        environment = {**os.environ, _MARK: self._mark}
        # What it has to say is in its metrics, or was wrong before the first step.
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self._process.pid, *self._workers()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> RecoveryLog:
        """What the run has written so far."""
        return read_log(self._run / METRICS, self._ranks)

    def wait_for_steps(self, seconds: float) -> None:
        """Waits for a step that was not done before, of the job after the latest kill, and then so many seconds.

        Raises:
            UserError: There is none.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(step.job >= self._job for step in self.log().new):
            if self._process.poll() is not None or time.monotonic() > deadline:
                command = shlex.join(self._arguments)
                raise UserError(f"the training does not go on: python {command}; try it by itself")
            time.sleep(0.05)
        time.sleep(seconds)

    def kill_one(self, workers: int) -> None:
        """Kills one of the ranks: of the processes, those that were started first, before a spare."""
        self._job = self.log().steps[-1].job + 1
        self.kills.append(time.time())
        os.kill(random.choice(self._workers()[:workers]), signal.SIGKILL)

    def _workers(self) -> list[int]:
        """Processes that are ranks, or wait to be, in the order in which they were started."""
        ranks = {SEAT, "LOCAL_RANK", "RANK"}
        return [number for number, items in marked(_MARK, self._mark).items() if items.keys() & ranks]


def _print(rows: Sequence[Recovery]) -> None:
    print(
        f"{'':<36} kills  stall, median        worst  rejoins  stall, median   worst  steps repeated  "
        "goodput, and lost: stopped  joining  repeated  slower"
    )
    for row in rows:
        median = f"{row.median_seconds:6.2f} +- {row.spread_seconds:.2f} s"
        rejoin, worst = (
            "" if seconds is None else f"{seconds:.2f} s" for seconds in (row.rejoin_seconds, row.rejoin_worst_seconds)
        )
        print(
            f"{row.system:<36} {row.kills:>5}  {median:>16}  {row.worst_seconds:5.2f} s  {row.rejoins:>7}  {rejoin:>13}"
            f"  {worst:>6}  {row.steps_repeated:>14}"
            f"  {row.goodput:7.1%}{row.stopped:20.1%}{row.joining:9.1%}{row.repeated:10.1%}{row.slower:8.1%}"
        )
    told = [
        (f"{row.system}: {what}", parts)
        for row in rows
        for what, parts in (("kill", row.parts), ("rejoin", row.rejoin_parts))
        if parts
    ]
    if told:
        names = [part.replace("_", " ") for part in PARTS]
        print(f"\n{'ms from the last step to the next':<44}" + "".join(f"{name:>11}" for name in (*names, "in all")))
    for name, parts in told:
        figures = [*parts.values(), sum(parts.values())]
        print(f"{name:<44}" + "".join(f"{seconds * 1e3:>11.0f}" for seconds in figures))
