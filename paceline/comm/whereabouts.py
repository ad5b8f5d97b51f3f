"""Where this rank is, for those who wait for it: in words, with the stacks of its threads, while it goes on.

Nothing is written down as ops run but which one began last (`latest`). A thread that looks now and then notices for how
long that has been the same.
"""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from paceline.comm.cpu.registry import entered, under_way


class Activity(Protocol):
    """An op of the program, which runs or has ended."""

    @property
    def words(self) -> str:
        """Such as "forward of blocks.4"."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, and none has begun since."""
        ...

    @property
    def since(self) -> float | None:
        """When it began, or ended, by time.perf_counter; None where only a GPU knows."""
        ...


latest: Activity | None = None
"""What the engine began last."""
messages = 0
"""Control messages that this rank has entered, of the job that it is in."""
message = ""
"""What the control message that it waits in is about."""
MESSAGES = "messages"
"""What `entered` calls them."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = tuple({_PACKAGE, _TORCH, *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))})
_SITE = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib", "scripts")})
_LOADING = (os.path.join(_TORCH, "utils", "data", ""), os.path.join(_PACKAGE, "data", ""))
_OWN_THREADS = "paceline "
_LOOKING_THREADS = ("paceline watch", "paceline roll call")
_MOST_FRAMES = 60


class Look:
    """What is known of this rank from looking at it again and again."""

    def __init__(self) -> None:
        """Looks for the first time."""
        self._seen: tuple[Activity | None, bool] = None, True
        self._since = time.perf_counter()

    def again(self) -> dict[str, Any]:
        """Where this rank is now.

        Returns:
            "words": what it does; "at": in which line; "seconds": for how long it has done so, on a GPU counted
            from the first look that found it; "entered": the number of the last collective that it has entered, by
            transport.
        """
        seen = latest, latest is None or latest.has_ended
        if seen != self._seen:
            since = latest.since if latest is not None else None
            self._seen, self._since = seen, since or time.perf_counter()
        frames = _frames_of_main_thread()
        words = _words(*seen, [frame.f_code.co_filename for frame in frames])
        return {
            "words": words,
            "at": _line_of(frames),
            "seconds": time.perf_counter() - self._since,
            "entered": {**entered(), MESSAGES: messages},
        }

    def in_words(self) -> str:
        """Where this rank is, and which ops it is in."""
        place, ops = self.again(), [*under_way(), *filter(None, [message])]
        line = f", at {place['at']}" if place["at"] else ""
        waits = f"; communicates {', '.join(ops)}" if ops else "; communicates nothing"
        return f"for {place['seconds']:.1f} s in {place['words']}{line}{waits}"


def stacks() -> str:
    """Where each thread of this process is, the main one first, paceline's own last, most recent call first."""
    frames = _frames()
    lines = []
    for thread in sorted(threading.enumerate(), key=_order):
        frame = frames.get(thread.ident or 0)
        if frame is None or thread.name in _LOOKING_THREADS:
            continue
        if getattr(thread, "is_idle", False):
            lines.append(f"thread {thread.name}: idle")
            continue
        lines.append(f"thread {thread.name}:")
        lines += [f"  {_place(each.f_code, each.f_lineno, whole=True)}" for each in _chain(frame)]
    return "\n".join(lines)


def _order(thread: threading.Thread) -> tuple[int, str]:
    if thread is threading.main_thread():
        return 0, ""
    return (2 if thread.name.startswith(_OWN_THREADS) else 1), thread.name


def _words(activity: Activity | None, has_ended: bool, files: list[str]) -> str:
    """What the main thread does, from the op that began last and the files that it is in, innermost first."""
    if any(file.startswith(_LOADING) for file in files):
        return "data loading"
    # One that an exception cut off has no end, but nothing of it is on the stack any more.
    if activity is not None and not has_ended and any(file.startswith((_TORCH, _PACKAGE)) for file in files):
        return activity.words
    before = f"after {activity.words}" if activity is not None else "before the first step"
    theirs = next((file for file in files if file.startswith(_PACKAGE) or _is_users(file)), "")
    return f"paceline {before}" if theirs.startswith(_PACKAGE) else f"the program's own code {before}"


def _chain(frame: FrameType | None) -> list[FrameType]:
    """A frame and those that called it, innermost first."""
    found: list[FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(frame)
        frame = frame.f_back
    return found


def _frames_of_main_thread() -> list[FrameType]:
    return _chain(_frames().get(threading.main_thread().ident or 0))


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each thread.

    Python 3.11 makes them under a lock that each thread needs to end. If the garbage collector ran meanwhile, and with
    it a finaliser that waits for a thread, as a dropped model's does, the process would stand still for ever.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _line_of(frames: list[FrameType]) -> str:
    """The innermost line of the user's own; else the innermost of all."""
    own = [frame for frame in frames if _is_users(frame.f_code.co_filename)]
    return _place(frame.f_code, frame.f_lineno) if (frame := next(iter(own or frames), None)) is not None else ""


def _is_users(file: str) -> bool:
    # Site-packages lie in the standard library's folder.
    return not file.startswith(("<", *_LIBRARIES, *_SITE))


def _place(code: CodeType, line: int, whole: bool = False) -> str:
    file = code.co_filename if whole else Path(code.co_filename).name
    # Without the line's text: files may lie where a read hangs, as the one that this is about.
    return f"{file}:{line} in {code.co_name}"
