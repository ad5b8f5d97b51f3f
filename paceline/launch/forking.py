"""A process that has imported what workers need, and is forked for each of them.

So torch is imported once on a host, not by every worker. The process runs the workers' own command up to
`become_worker`, which returns in a worker only. It computes nothing: threads and a GPU's state do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from paceline.launch.imports import kept_for_good
from paceline.launch.process import Command, OnThisHost
from paceline.launch.seat import SEAT
from paceline.launch.worker import FORKS, LAUNCHER, die_with

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where there is such, workers start as programs: a library that looks at a GPU while it is imported bars forks."""
_PR_SET_CHILD_SUBREAPER = 36
_LARGEST = 1 << 16
_POLL_SECONDS = 0.05


class ForkedProcess(OnThisHost):
    """A worker that was forked and then handed to this process as its child; see `Process`."""

    def __init__(self, pid: int, stderr: IO[bytes] | None) -> None:
        """Of a process of this number, which nobody else waits for."""
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """See `Process`."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """See `Process`."""
        while (status := self._reap(0)) is None:
            pass
        return status

    def send_signal(self, sig: int, /) -> None:
        """See `Process`."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, how)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Forks:
    """The process that workers are forked from, as their launcher sees it."""

    def __init__(self, command: Command, environment: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            command: Of the workers; with `imports`.
            environment: What it is told besides this process's own.

        Raises:
            OSError: It cannot be started.
        """
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            told = {FORKS: ",".join([str(theirs.fileno()), *command.imports]), LAUNCHER: str(os.getpid())}
            self._process = subprocess.Popen(
                command.words,
                env={**os.environ, **environment, **told},
                stdin=subprocess.DEVNULL,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )

    @staticmethod
    def can_be() -> bool:
        """Whether workers of this host may be forked, and be this process's children then."""
        if sys.platform != "linux" or any(map(os.path.exists, GPUS)):
            return False
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)

    def start(
        self, environment: Mapping[str, str], has_screen: bool, lines: Sequence[int], unless: Callable[[], object]
    ) -> ForkedProcess | None:
        """Another worker; None where this process is gone, or `unless` came true while it still imported.

        Args:
            environment: What the worker is told besides.
            has_screen: Whether it writes to this process's stdout and stderr; else its stderr can be read.
            lines: Descriptors that it gets, if any, for its `Seat`.
            unless: Asked some twenty times a second.
        """
        read = write = None
        try:
            if not has_screen:
                read, write = os.pipe()
            with open(os.devnull, "r+b") as nothing:
                out, err = (1, 2) if write is None else (nothing.fileno(), write)
                message = json.dumps(dict(environment)).encode()
                socket.send_fds(self._line, [message], [nothing.fileno(), out, err, *lines])
            pid = self._answer(unless)
        except OSError:
            pid = None
        finally:
            if write is not None:
                os.close(write)
        if pid is None:
            self.close()
            if read is not None:
                os.close(read)
            return None
        return ForkedProcess(pid, None if read is None else os.fdopen(read, "rb"))

    def close(self) -> None:
        """Ends it."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, unless: Callable[[], object]) -> int | None:
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        while not unless():
            if poll.poll(_POLL_SECONDS * 1000):
                answer = self._line.recv(_LARGEST)
                return json.loads(answer) if answer else None
        return None


def become_worker() -> None:
    """Returns at once in a program; in the process that workers are forked from, in each worker only."""
    if (given := os.environ.pop(FORKS, None)) is None:
        return
    launcher = int(os.environ[LAUNCHER])
    die_with(launcher)
    number, *modules = given.split(",")
    # What is wrong with them each worker says.
    with contextlib.suppress(Exception), kept_for_good():
        for module in modules:
            importlib.import_module(module)
    line = socket.socket(fileno=int(number))
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, _LARGEST, 8)
        if not message:
            os._exit(0)
        if (pid := _forked()) is None:
            line.close()
            _begin(json.loads(message), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(json.dumps(pid).encode())


def _forked() -> int | None:
    """Forks a process whose parent will be the launcher; its number, and None in it.

    A process between the two ends at once, so that the kernel looks for the nearest that takes orphans in.
    """
    read, write = os.pipe()
    between = os.fork()
    if between:
        os.close(write)
        os.waitpid(between, 0)
        with os.fdopen(read, "rb") as pipe:
            return int(pipe.read())
    os.close(read)
    between = os.getpid()
    if pid := os.fork():
        os.write(write, b"%d" % pid)
        os._exit(0)
    os.close(write)
    os.setpgid(0, 0)
    while os.getppid() == between:
        time.sleep(0.0005)
    return None


def _begin(environment: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Gives a worker what it would have been started with."""
    for own, given in enumerate(descriptors[:3]):
        os.dup2(given, own)
        os.close(given)
    os.environ.update(environment)
    if lines := descriptors[3:]:
        os.environ[SEAT] = ",".join(map(str, lines))
