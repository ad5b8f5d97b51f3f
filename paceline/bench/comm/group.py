"""Groups of rank processes that `paceline bench comm` keeps alive and runs in turn; seen from the controller."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.bench.comm.rank import ADDRESS, receive, send
from paceline.launch.temporary_folder import TemporaryFolder

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0
GRACE_SECONDS = 5.0


class GroupError(RuntimeError):
    """A group's processes could not start, ended or hung; says why."""


class Group:
    """The ranks of one library. Between requests they wait on a socket, which takes no time from those that run."""

    def __init__(self, ranks: int, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]):
        """Starts the processes and waits until all ranks have said what they offer.

        Args:
            ranks: How many ranks to expect.
            commands: To start; one of them may start all ranks, as mpiexec does.
            environments: Variables for each command, besides those of this process.

        Raises:
            GroupError: They did not come.
        """
        self._folder = TemporaryFolder("bench")
        self._log = self._folder.path / "log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: dict[int, Connection] = {}
        self._handles: list[int] = []
        self.closed = False
        try:
            # A folder that only this user may enter: no other can connect.
            address = str(self._folder.path / "socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, self._log.open("wb") as log:
                listener.bind(address)
                listener.listen(ranks)
                listener.settimeout(0.1)
                for command, environment in zip(commands, environments, strict=True):
                    process = subprocess.Popen(
                        command,
                        env={**os.environ, **environment, ADDRESS: address},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        # Ctrl-C is for this process, which then ends them in good order.
                        start_new_session=True,
                    )
                    self._processes.append(process)
                hellos = self._accept(listener, ranks)
        except BaseException:
            self.close()
            raise
        self.offered: dict[str, dict[str, list[str]]] = hellos[0]["offered"]
        """Algorithms by library and collective."""
        self.missing: dict[str, str] = hellos[0]["missing"]
        """Libraries that the group cannot run, with the reason."""

    def _accept(self, listener: socket.socket, ranks: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + START_SECONDS
        hellos: dict[int, dict[str, Any]] = {}
        while len(hellos) < ranks:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                ended = [process for process in self._processes if process.poll() is not None]
                if ended:
                    reason = self._last_words() or f"its processes ended with status {ended[0].returncode}"
                    raise GroupError(reason) from None
                if time.monotonic() > deadline:
                    raise GroupError(f"{len(hellos)} of {ranks} ranks came within {START_SECONDS:g} s") from None
                continue
            link.settimeout(None)
            connection = Connection(link.detach())
            hello = self._receive(connection, START_SECONDS)
            if hasattr(os, "pidfd_open"):  # Linux
                self._handles.append(os.pidfd_open(hello["pid"]))
            if hello["ranks"] != ranks:
                connection.close()
                raise GroupError(f"a world of {hello['ranks']} instead of {ranks}: mpiexec is not of this library")
            hellos[hello["rank"]] = hello
            self._ranks[hello["rank"]] = connection
        return [hellos[rank] for rank in range(ranks)]

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Sends a request to every rank.

        Returns:
            Their answers, in rank order.

        Raises:
            GroupError: A rank ended, or did not answer in time.
        """
        try:
            for connection in self._ranks.values():
                send(connection, request)
        except OSError as error:
            raise GroupError(self._last_words() or "a rank ended") from error
        return [self._receive(self._ranks[rank], ANSWER_SECONDS) for rank in sorted(self._ranks)]

    def _receive(self, connection: Connection, timeout: float) -> dict[str, Any]:
        if not connection.poll(timeout):
            raise GroupError(f"a rank gave no answer within {timeout:g} s")
        try:
            return receive(connection)
        except (EOFError, OSError) as error:
            raise GroupError(self._last_words() or "a rank ended") from error

    def close(self) -> None:
        """Ends every process of the group. Safe to call twice."""
        self.closed = True
        with _undisturbed():
            for connection in self._ranks.values():
                connection.close()
            # Asked by the closed connections, then by a signal, then not asked.
            for end in (None, subprocess.Popen.terminate, _kill_session):
                for process in self._processes:
                    if end is not None and process.poll() is None:
                        end(process)
                deadline = time.monotonic() + GRACE_SECONDS
                for process in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0))
            # A launcher that was killed may have left ranks in sessions of their own. A handle, unlike a number,
            # never means another process.
            for handle in self._handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
            self._handles.clear()
            self._folder.close()

    def _last_words(self) -> str:
        """The last line that the processes wrote, which names an exception where there was one."""
        time.sleep(0.2)
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        named = [line for line in lines if "Error: " in line]
        return (named or lines or [""])[-1]


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts off Ctrl-C until the processes are ended, lest a second one leaves some behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def python_module(name: str) -> list[str]:
    """The command that runs a module of paceline in another process, with the module search path of this one."""
    return [sys.executable, "-P", "-m", name]


def search_path() -> dict[str, str]:
    """The environment variable that makes `python_module` find paceline where this process did."""
    package = str(Path(__file__).parents[3])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
