"""The folder that holds all of a run. Never overwritten; a full disk costs figures, not the training."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.launch.screen import show

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
TOKENIZER = "tokenizer.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SKIPPED = "skipped.jsonl"
SAMPLES = "samples.jsonl"
GRADIENT_NORMS = "gradient_norms.jsonl"
CHUNK_PRODUCTS = "chunk_products.jsonl"
PLAN = "plan.json"
LINES = (METRICS, EVENTS, SKIPPED, SAMPLES, GRADIENT_NORMS, CHUNK_PRODUCTS)
"""Files that grow by a line at a time: those up to a checkpoint's step are on the disk when it counts."""
WEIGHTS = "model.safetensors"
RUNS = "runs"
LATEST = "latest"


class RunFolder:
    """One run's files. Only rank 0 has one.

    A file that cannot be written is warned about once; `problems` keeps what was lost.

    Attributes:
        path: The folder.
        problems: Reason for each file that could not be written in full.
    """

    def __init__(self, path: Path) -> None:
        """Uses `path`, which exists (see `create_run_folder`), until this process ends.

        Raises:
            UserError: Another process does, or nothing can be written there.
        """
        self.path = path
        if not os.access(path, os.W_OK):
            raise UserError(f"run folder {path} cannot be written to: make it writable, or train in a copy of it")
        self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(
                f"run folder {path} is in use: another process trains there. Wait for it, or stop it, to go on with it"
            ) from None
        except OSError:
            # Not every file system that hosts share has locks.
            pass
        self.problems: dict[str, str] = {}
        self._lost_lines: Counter[str] = Counter()

    def append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Adds one JSON line per record, all of them or none."""
        lines = [json.dumps(record, allow_nan=False) for record in records]
        if not lines:
            return
        try:
            _append("".join(f"{line}\n" for line in lines).encode(), self.path / name)
        except OSError as error:
            self._lost_lines[name] += len(lines)
            self._problem(name, error)

    def write(self, name: str, writer: Callable[[Path], object]) -> bool:
        """Lets `writer` write the file, whole or not at all; False if it could not."""
        path = self.path / name
        try:
            writer(path)
        except (OSError, UserError) as error:
            self._problem(name, error)
            return False
        self.problems.pop(name, None)
        return True

    def write_text(self, name: str, text: str) -> bool:
        """Writes a text file, whole or not at all; False if that failed."""
        return self.write(name, lambda path: _replace_text(path, text))

    def close(self) -> None:
        """Lets others use the folder."""
        os.close(self._lock)

    def describe_problems(self) -> list[str]:
        """What could not be written, a line each."""
        return [
            f"{self.path / name} could not be written in full: {reason}"
            + (f" ({self._lost_lines[name]:,} lines are missing)" if self._lost_lines[name] else "")
            for name, reason in self.problems.items()
        ]

    def _problem(self, name: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error.__cause__ or error)
        if name not in self.problems:
            show(
                f"WARNING: {self.path / name} cannot be written: {reason}. Training goes on without it; room on the "
                "disk is all it needs",
                warning=True,
            )
        self.problems[name] = reason


def check_run_folder(folder: str | None) -> None:
    """Checks before any work that a folder can be used for a new run.

    Args:
        folder: What the user wants; None for runs/<date>-<time>-<preset>, which always can.

    Raises:
        UserError: The folder holds something already.
    """
    if folder is not None:
        path = Path(folder).expanduser()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise _is_there(path)


def create_run_folder(folder: str | None, preset: str) -> RunFolder:
    """Makes a folder that no other run has and, if it lies in `runs`, lets `runs/latest` point to it.

    Args:
        folder: What the user wants; None for runs/<date>-<time>-<preset>, with a number where that is taken.
        preset: Name of the model's shape, for the default.

    Raises:
        UserError: The folder cannot be made or written to, or holds something already.
    """
    check_run_folder(folder)
    path = _new_folder(preset) if folder is None else Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Whoever makes the first file owns the folder, one that was there and empty, too.
        (path / CONFIG).open("x").close()
    except FileExistsError:
        raise _is_there(path) from None
    except OSError as error:
        raise UserError(
            f"run folder {path} cannot be made or written to: {error.strerror}; choose another with --folder"
        ) from None
    if path.parent.name == RUNS:
        _point_latest_to(path)
    return RunFolder(path)


def find_run(name: str, needs: str = CONFIG) -> Path:
    """The folder of an existing run.

    Args:
        name: Path of the run's folder.
        needs: A file that it must hold.

    Raises:
        UserError: There is no such folder, or the file is not in it.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        known = sorted(item.name for item in Path(RUNS).glob("*") if item.is_dir() and not item.is_symlink())[-3:]
        hint = f"; newest in {RUNS}/: {', '.join(known)}" if known else "; `paceline train` makes one"
        raise UserError(f"there is no run folder {path}{hint}")
    if not (path / needs).is_file():
        reasons = {
            WEIGHTS: " (weights are saved at each validation and at the end)",
            EVENTS: " (log.events-every says in which steps events are recorded; 0 is in none)",
        }
        raise UserError(f"run folder {path} holds no {needs}{reasons.get(needs, '')}; choose another run")
    return path


def run_of(name: str) -> Path:
    """The folder of the run that `--resume` names by itself or by one of its checkpoints.

    Raises:
        UserError: There is no such run.
    """
    path = Path(name).expanduser()
    for run in (path, *path.resolve().parents[:2]):
        if (run / CONFIG).is_file():
            return run
    raise UserError(f"resume: {path} is no run's folder and no checkpoint of one: name one, such as {RUNS}/{LATEST}")


def _is_there(path: Path) -> UserError:
    return UserError(
        f"run folder {path} is there already and not empty, and runs are never overwritten: choose another "
        "name with --folder, leave --folder out for a new one, or remove it"
    )


def _new_folder(preset: str) -> Path:
    """Makes runs/<date>-<time>-<preset>, which another process may want at the same moment.

    Raises:
        UserError: It cannot be made.
    """
    name, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{preset}", 1
    while True:
        path = Path(RUNS, name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(
                f"run folder {path} cannot be made: {error.strerror}; choose another with --folder"
            ) from None
        else:
            return path


def _point_latest_to(path: Path) -> None:
    link, temporary = path.parent / LATEST, path.parent / f".{LATEST}-{os.getpid()}"
    try:
        temporary.symlink_to(path.name)
        temporary.replace(link)
    except OSError:
        # File systems without symbolic links do without.
        temporary.unlink(missing_ok=True)


def _append(data: bytes, path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # A line that whatever ended the run before has cut off spoils none but itself.
        cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            left = b"\n" + data if cut else data
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            # Readers of the file expect whole lines.
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
