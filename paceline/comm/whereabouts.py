"""Where this rank is, for those who wait for it: in words, with the stacks of its threads, while it goes on.

Nothing is written down as ops run but which one began last (`latest`). A thread that looks now and then notices for how
long that has been the same.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from paceline.comm.cpu.registry import entered, under_way


class Activity(Protocol):
    """An op of the program, which runs or has ended."""

    @property
    def words(self) -> str:
        """The op in words, such as "forward of blocks.4"."""
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
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) ")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


class _Call(NamedTuple):
    file: str
    line: int
    name: str


class Look:
    """What is known of this rank from looking at it again and again."""

    def __init__(self) -> None:
        """Looks for the first time, in the thread that trains."""
        self._seen: tuple[Activity | None, bool] = None, True
        self._since = time.perf_counter()
        self._thread, self._state = threading.current_thread(), _thread_state()

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
        calls = _calls_in(self._state) if self._thread.is_alive() else []
        words = _words(*seen, [call.file for call in calls])
        return {
            "words": words,
            "at": _line_of(calls),
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
    places = _places()
    lines = []
    for thread in sorted(threading.enumerate(), key=_order):
        calls = places.get(thread.ident or 0)
        if calls is None or thread.name in _LOOKING_THREADS:
            continue
        if getattr(thread, "is_idle", False):
            lines.append(f"thread {thread.name}: idle")
            continue
        lines.append(f"thread {thread.name}:")
        lines += [f"  {call.file}:{call.line} in {call.name}" for call in calls]
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


_PYTHON = ctypes.PyDLL(None)
_thread_state = _PYTHON.PyThreadState_Get
_thread_state.restype = ctypes.c_void_p
_dump_calls = getattr(_PYTHON, "_Py_DumpTraceback", None)
if _dump_calls is not None:
    # Once: what another thread's call reads its arguments by would be freed under it.
    _dump_calls.argtypes, _dump_calls.restype = (ctypes.c_int, ctypes.c_void_p), None


def _calls_in(state: int) -> list[_Call]:
    """The calls that a thread is in, innermost first; none where Python's library does not offer to tell.

    By what `faulthandler` calls for one thread. It makes no frame objects: in CPython 3.11, to follow those of a thread
    that goes on meanwhile (`sys._current_frames`, `f_back`) can end the process by a segmentation fault. And it looks
    at no other thread: native ones (autograd's, Gloo's and NCCL's) make themselves known to Python while this one has
    the interpreter, and to look at one that is half known ends the process, too.

    Args:
        state: Of a thread that has not ended, as `_thread_state` gives it there.
    """
    if _dump_calls is None:
        return []
    return [call for line in _dumped(lambda file: _dump_calls(file, state)) for call in _call(line)]


def _places() -> dict[int, list[_Call]]:
    """The calls that each thread is in, innermost first; of the 100 youngest threads.

    For who waits in vain alone, and not for signs of life: see `_calls_in`.
    """
    found: dict[int, list[_Call]] = {}
    calls: list[_Call] = []
    for line in _dumped(lambda file: faulthandler.dump_traceback(file, all_threads=True)):
        if head := _THREAD.match(line):
            calls = found[int(head[1], 16)] = []
        else:
            calls += _call(line)
    return found


def _call(line: str) -> list[_Call]:
    found = _CALL.match(line)
    return [_Call(_unescaped(found[1]), int(found[2]), _unescaped(found[3]))] if found else []


def _dumped(dump: Callable[[int], object]) -> list[str]:
    """Lines that a function writes into a file."""
    try:
        file = os.memfd_create("paceline stacks")
    except (AttributeError, OSError):
        # Where the system does not know it, places remain unknown.
        return []
    try:
        dump(file)
        return os.pread(file, os.fstat(file).st_size, 0).decode("ascii", errors="replace").splitlines()
    finally:
        os.close(file)


def _unescaped(text: str) -> str:
    """A name as it is, which is written in ASCII."""
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def _line_of(calls: list[_Call]) -> str:
    """The innermost line of the user's own; else the innermost of all."""
    own = [call for call in calls if _is_users(call.file)]
    call = next(iter(own or calls), None)
    # Without the line's text: files may lie where a read hangs, as the one that this is about.
    return f"{Path(call.file).name}:{call.line} in {call.name}" if call is not None else ""


def _is_users(file: str) -> bool:
    # Site-packages lie in the standard library's folder.
    return not file.startswith(("<", *_LIBRARIES, *_SITE))
