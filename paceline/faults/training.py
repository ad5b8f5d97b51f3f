"""A small training that a fault is brought about in, given the same command until it is at its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from paceline.checkpoint.folder import CHECKPOINTS
from paceline.comm.environment import OF_A_RANK
from paceline.faults.outcome import Curve, curve, jobs, wrong_with_checkpoints, wrong_with_curve
from paceline.launch.marked import marked
from paceline.launch.seat import SEAT

MARK = "PACELINE_FAULTS_MARK"
PATIENCE = 300.0
"""Seconds after which what has not happened is a failure."""
STEPS = 120
ATTEMPTS = 5
"""So often the same command is given until the run is at its end."""
TAIL = 700
"""Characters of what a training printed last, in a failure's message."""
_PR_SET_PDEATHSIG = 1


class FaultError(Exception):
    """A fault did not strike, or its outcome is not the expected one; the message says which and how."""


class LackingError(Exception):
    """The machine turns out to lack what a fault needs, such as the right to mount; the message says what."""


def make_text(folder: Path) -> None:
    """Writes the same made-up documents every time."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for number in range(8):
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=700)))


class Training:
    """One run of two ranks.

    Attributes:
        folder: Of this fault alone.
        run: The run's folder; may lie on another file system than `folder`.
        flags: What is given besides the usual settings.
        rounding: Whether other ranks went on, so that figures may differ by rounding.
        closing: What goes when the training has ended, such as a mount.
    """

    def __init__(self, folder: Path, text: Path, steps: int = STEPS, flags: Sequence[str] = ()) -> None:
        """`text` is a folder that `make_text` has made, beside which the tokens are kept."""
        (folder / "tmp").mkdir(parents=True)
        self.folder, self.text, self.run, self.steps = folder, text, folder / "run", steps
        self.flags, self.rounding = list(flags), False
        self.closing = contextlib.ExitStack()
        self._mark, self._log = uuid.uuid4().hex, folder / "output.txt"

    # ---- starting

    def command(self, workers: int | None = 2) -> list[str]:
        """What starts it, and what goes on with it. Without workers: as one rank of a job in the environment."""
        settings = {
            "--model.preset": "nano",
            "--data.vocabulary": 300,
            "--data.validation": 0.3,
            "--data.path": self.text,
            "--data.cache": self.text.with_name("cache"),
            "--threads": 1,
            "--steps": self.steps,
            "--log.every": 1,
            "--log.events-every": 0,
            "--log.validate-every": 0,
            "--log.validate-batches": 1,
            "--checkpoint.every": 10,
            "--folder": self.run,
            "--resume": "auto",
        } | ({} if workers is None else {"--workers": workers})
        usual = [str(word) for item in settings.items() for word in item]
        return [sys.executable, "-m", "paceline", "train", *usual, *self.flags]

    def environment(self) -> dict[str, str]:
        """The variables by which its processes are known."""
        inherited = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
        return inherited | {MARK: self._mark, "TMPDIR": str(self.folder / "tmp")}

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it, or goes on. It ends with this process, whatever ends that."""
        with self.log() as log:
            return subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def log(self) -> BinaryIO:
        """The file that gets what is printed."""
        return self._log.open("ab")

    # ---- watching

    def processes(self) -> dict[int, dict[str, str]]:
        """Environment of each process of it, by number, in the order in which they were started."""
        return marked(MARK, self._mark)

    def ranks(self) -> dict[int, int]:
        """Process number of each rank that is there; not where workers are replaced."""
        return {int(items["RANK"]): number for number, items in self.processes().items() if "RANK" in items}

    def seated(self) -> list[int]:
        """Process numbers of workers that may be replaced and of spares, in the order in which they were started."""
        return [number for number, items in self.processes().items() if SEAT in items]

    def wait_for(self, process: subprocess.Popen[bytes], there: Callable[[], bool], what: str) -> None:
        """Returns when `there()` is true.

        Raises:
            FaultError: It does not come to be, or the process ends before.
        """
        deadline = time.monotonic() + PATIENCE
        while not there():
            if process.poll() is not None and not there():
                raise FaultError(f"it ended with status {process.returncode} before {what}: {self.tail()}")
            if time.monotonic() > deadline:
                raise FaultError(f"{what}: not after {PATIENCE:.0f} s: {self.tail()}")
            time.sleep(0.02)

    def start_and_wait(self, checkpoints: int = 1) -> subprocess.Popen[bytes]:
        """Starts it, and returns in the midst of it: so many checkpoints are there, and most steps are still to do."""
        process = self.start()
        self.wait_for_checkpoints(process, checkpoints)
        return process

    def wait_for_checkpoints(self, process: subprocess.Popen[bytes], count: int) -> None:
        """Returns when so many are there, and steps were done after the first.

        Raises:
            FaultError: They do not come to be.
        """
        self.wait_for(
            process, lambda: len(self.checkpoints()) >= count and self.last_step() > 12, f"{count} checkpoints"
        )

    def checkpoints(self) -> list[Path]:
        """The checkpoints that count, the latest first."""
        return sorted((path.parent for path in (self.run / CHECKPOINTS).glob("step-*/manifest.json")), reverse=True)

    def last_step(self) -> int:
        """The highest that was logged; 0 for none."""
        return max(curve(self.run), default=0)

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status, once every process of the job has gone.

        Raises:
            FaultError: It does not end, or leaves processes behind.
        """
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise FaultError(f"it does not end within {PATIENCE:.0f} s: {self.tail()}") from None
        deadline = time.monotonic() + 60
        while left := self.processes():
            if time.monotonic() > deadline:
                raise FaultError(f"processes {sorted(left)} outlive the job by a minute")
            time.sleep(0.05)
        return status

    def said(self) -> str:
        """All that was printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def tail(self) -> str:
        """What was printed last."""
        return self.said()[-TAIL:].strip()

    # ---- judging

    def must_be_midway(self) -> int:
        """The last step that was logged.

        Raises:
            FaultError: It is the run's last: what was done then disturbed nothing.
        """
        if (step := self.last_step()) >= self.steps:
            raise FaultError("the training was at its end before anything struck it")
        return step

    def must_say(self, words: str) -> None:
        """Checks that something was printed.

        Raises:
            FaultError: It was not.
        """
        if words not in self.said():
            raise FaultError(f"nothing was said of {words!r}: {self.tail()}")

    def go_on(self) -> None:
        """Gives the same command until the run is at its end.

        Raises:
            FaultError: It does not get there, or begins from the start though there are checkpoints.
        """
        for _ in range(ATTEMPTS):
            if self.last_step() == self.steps:
                return
            if (there := bool(self.checkpoints())) and (wrong := wrong_with_checkpoints(self.run)):
                raise FaultError("; ".join(wrong))
            before = len(jobs(self.run))
            self.wait(self.start())
            if there and any(job.after == 0 for job in jobs(self.run)[before:]):
                raise FaultError(f"it began from the start though there are checkpoints: {self.tail()}")
        if self.last_step() != self.steps:
            raise FaultError(f"after {ATTEMPTS} more starts it is at step {self.last_step()}: {self.tail()}")

    def check(self, expected: Curve) -> None:
        """Compares what is left with an undisturbed run.

        Raises:
            FaultError: Something is wrong.
        """
        # A rank that is lost after the update of a step keeps the others from logging it; they go on after it.
        unlogged = [job.after for job in jobs(self.run) if job.seconds is not None]
        wrong = wrong_with_curve(curve(self.run), expected, self.rounding, unlogged)
        if wrong := wrong + wrong_with_checkpoints(self.run):
            raise FaultError("; ".join(wrong))

    def begin_again(self) -> None:
        """Removes the run, so that the same command begins another."""
        shutil.rmtree(self.run)

    def kill(self) -> None:
        """Kills every process of it."""
        while left := self.processes():
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.02)

    def end(self) -> None:
        """Kills every process of it and removes what was made for it; safe to call twice."""
        self.kill()
        self.closing.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
