"""A small training that a fault is brought about in, and what is looked at of it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.faults.outcome import Curve, curve, wrong_with_checkpoints, wrong_with_curve, wrong_with_end

MARK = "PACELINE_FAULTS_MARK"
PATIENCE = 300.0
"""Seconds after which a job that has not ended is a failure."""
STEPS = 40
ATTEMPTS = 5
"""So often the same command is given until the run is at its end."""


class FaultError(Exception):
    """A fault did not have the outcome that is expected of it; the message says what was."""


def make_text(folder: Path) -> None:
    """Writes the same made-up documents every time."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for number in range(8):
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=700)))


class Training:
    """One run of two ranks in `folder`, given the same command until it is at its end.

    Attributes:
        folder: Of this fault alone.
        expected: Figures of an undisturbed run.
        run: The run's folder; may lie on another file system than `folder`.
    """

    def __init__(self, folder: Path, text: Path, expected: Curve, run: Path | None = None) -> None:
        """`text` is a folder that `make_text` has made, beside which the tokens are kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.text, self.run = folder, text, run or folder / "run"
        self.expected = expected
        self.mark = uuid.uuid4().hex
        self.log = folder / "output.txt"

    def arguments(self, workers: int | None = 2) -> list[str]:
        """The command that starts it and goes on with it."""
        settings = {
            "--model.preset": "nano",
            "--data.vocabulary": 300,
            "--data.validation": 0.3,
            "--data.path": self.text,
            "--data.cache": self.text.with_name("cache"),
            "--threads": 1,
            "--steps": STEPS,
            "--log.every": 1,
            "--log.validate-every": 0,
            "--log.validate-batches": 1,
            "--checkpoint.every": 4,
            "--folder": self.run,
            "--resume": "auto",
        } | ({} if workers is None else {"--workers": workers})
        flags = [str(word) for item in settings.items() for word in item]
        return [sys.executable, "-m", "paceline", "train", *flags]

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it, or goes on."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.arguments(),
                cwd=self.folder,
                env={**os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def processes(self) -> dict[int, Mapping[str, str]]:
        """Environment of each process of it, by number."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    items = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if f"{MARK}={self.mark}" in items and state != "Z":
                        found[int(entry.name)] = dict(item.split("=", 1) for item in items if "=" in item)
        return found

    def ranks(self) -> dict[int, int]:
        """Process number of each rank that is there."""
        return {int(items["RANK"]): number for number, items in self.processes().items() if "RANK" in items}

    def wait_for(self, process: subprocess.Popen[bytes], there: Callable[[], bool], what: str) -> None:
        """Returns when `there()` is true or the process has ended.

        Raises:
            FaultError: Neither came to be.
        """
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and not there():
            if time.monotonic() > deadline:
                raise FaultError(f"{what}: not after {PATIENCE:.0f} s")
            time.sleep(0.02)

    def wait_for_step(self, process: subprocess.Popen[bytes], step: int) -> None:
        """Returns when a step is logged or the process has ended."""
        self.wait_for(process, lambda: max(curve(self.run), default=0) >= step, f"step {step}")

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status, once every process of the job has gone.

        Raises:
            FaultError: It does not end, or leaves processes behind.
        """
        self.wait_for(process, lambda: False, "the end of the job")
        deadline = time.monotonic() + 60
        while left := self.processes():
            if time.monotonic() > deadline:
                commands = {number: items.get("RANK", "launcher") for number, items in left.items()}
                raise FaultError("; ".join(wrong_with_end(commands)))
            time.sleep(0.05)
        return process.wait()

    def go_on(self) -> None:
        """Gives the same command until the run is at its end.

        Raises:
            FaultError: It does not get there.
        """
        for _ in range(ATTEMPTS):
            if STEPS in curve(self.run):
                return
            self.wait(self.start())
        if STEPS not in curve(self.run):
            raise FaultError(f"after {ATTEMPTS} more starts: {self.said()[-600:]}")

    def said(self) -> str:
        """All that was printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def check(self) -> None:
        """Compares what is left with an undisturbed run.

        Raises:
            FaultError: Something is wrong.
        """
        if wrong := wrong_with_curve(curve(self.run), self.expected) + wrong_with_checkpoints(self.run):
            raise FaultError("; ".join(wrong))

    def next_run(self) -> None:
        """Checks the run that has ended and makes way for another in the same folder.

        Raises:
            FaultError: Something is wrong with it.
        """
        self.check()
        shutil.rmtree(self.run)

    def end(self) -> None:
        """Kills every process of it."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
