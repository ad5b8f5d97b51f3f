"""A checkpoint on its way to the disk: written at once or beside training, waited for, told of where it failed."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.checkpoint.agreement import raise_first, reason
from paceline.checkpoint.folder import discard, sync
from paceline.checkpoint.writing import OwnPart, commit, write_part
from paceline.comm.world import World
from paceline.core.errors import UserError

PATIENCE_SECONDS = 600.0
"""How long rank 0 waits for a part of which nothing is heard."""


class Saving:
    """A checkpoint that is written, or has been.

    Attributes:
        path: Its folder.
        step: How many steps were done.
        stall_seconds: How long the call took that began it, in which this rank did nothing else.
        seconds: How long it took in all; None while it is written.
    """

    def __init__(self, path: Path, step: int, began: float) -> None:
        """Nothing is written yet.

        Args:
            path: See above.
            step: See above.
            began: When the call began, by `time.perf_counter`.
        """
        self.path, self.step = path, step
        self.stall_seconds = 0.0
        self.seconds: float | None = None
        self._began = began
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_seen = self._is_first = self._is_abandoned = False

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do, in whatever way it ended."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """Why it failed, as far as this rank knows by now. Rank 0 is told of every rank's failure."""
        self._is_seen = self.done
        return self._error if self.done else None

    def wait(self) -> None:
        """Returns when the checkpoint counts. A collective call.

        Raises:
            UserError: It could not be written; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_seen = True
        try:
            raise_first(self._error, "pl.save: how it ended", f"{self.path} was not saved")
        except UserError:
            if self._is_first:
                discard(self.path)
            raise

    def _begin(
        self, part: OwnPart, world: World, strategy: dict[str, Any], background: bool, beside: Iterable[Path]
    ) -> None:
        main, self._is_first = threading.current_thread(), world.rank == 0

        def write() -> None:
            try:
                write_part(self.path, part)
                if world.rank == 0:
                    for path in beside:
                        # What is written beside a checkpoint is worth less than that.
                        with contextlib.suppress(OSError):
                            sync(path)
                            sync(path.parent)
                    commit(
                        self.path,
                        self.step,
                        world.world_size,
                        strategy,
                        PATIENCE_SECONDS,
                        lambda: self._is_abandoned or (background and _is_over_by_failure(main)),
                        part.token,
                    )
            except Exception as error:
                # Told by `wait`, on every rank.
                self._error = error
            self.seconds = time.perf_counter() - self._began

        if background:
            self._thread = threading.Thread(target=write, name="checkpoint")
            self._thread.start()
        else:
            write()
            self.wait()
        self.stall_seconds = time.perf_counter() - self._began


_in_flight: tuple[World, Saving] | None = None
"""What was begun in the background last, and in which job."""


def begin(
    saving: Saving, part: OwnPart, world: World, strategy: dict[str, Any], background: bool, beside: Iterable[Path]
) -> Saving:
    """Writes a checkpoint, to its end or beside training; returns what tells of it.

    Args:
        saving: Of that checkpoint.
        part: What this rank writes.
        world: The job.
        strategy: How its ranks share the work.
        background: Whether beside training.
        beside: Files that rank 0 has on the disk before the checkpoint counts.
    """
    global _in_flight
    if background:
        _in_flight = world, saving
    saving._begin(part, world, strategy, background, beside)
    return saving


def _is_over_by_failure(main: threading.Thread) -> bool:
    """Whether the program has ended by an exception, after which other ranks' parts may never come."""
    return not main.is_alive() and getattr(sys, "last_value", None) is not None


@atexit.register
def _tell_at_exit() -> None:
    """Says of a save that a program ended without waiting for that it failed. Threads have ended by now."""
    if _in_flight is not None and not _in_flight[1]._is_seen and (error := _in_flight[1].error) is not None:
        print(f"paceline: {_in_flight[1].path} was not saved: {reason(error)}", file=sys.stderr)


def finish_earlier(world: World) -> None:
    """Waits for the save that is under way, and warns if it failed. A collective call."""
    global _in_flight
    earlier, _in_flight = _in_flight, None
    if earlier is not None and earlier[0] is world:
        is_seen = earlier[1]._is_seen
        try:
            earlier[1].wait()
        except UserError as error:
            if not is_seen:
                warnings.warn(str(error), stacklevel=3)


def abandon_earlier() -> None:
    """Ends the save that is under way in a job that has lost a rank, whose part may never come."""
    global _in_flight
    earlier, _in_flight = _in_flight, None
    if earlier is not None:
        earlier[1]._is_abandoned = True
        if earlier[1]._thread is not None:
            earlier[1]._thread.join()
