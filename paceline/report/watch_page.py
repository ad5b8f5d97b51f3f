"""The page of a run that goes on, served to browsers of this host alone and made anew as the run writes."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.report.html import tag
from paceline.report.page import page
from paceline.report.run import read_run
from paceline.report.watched import State, Watched
from paceline.train.run_folder import CONFIG, EVENTS, METRICS, WEIGHTS

HOST = "127.0.0.1"
_RELOAD_SECONDS = 10
"""After so long a browser asks again while the run goes on, and later where the page takes long to make."""
_NAMES = (CONFIG, METRICS, EVENTS, WEIGHTS)
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    # The page says itself which scripts run. No other site shows it in a frame or reads it.
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page of a run as it is; made again only when the run's files have changed."""

    def __init__(self, run: Watched) -> None:
        """Makes nothing yet."""
        self._run = run
        self._lock = threading.Lock()
        self._files: tuple[object, ...] | None = None
        self._text, self._reload, self._due = "", 1, 0.0

    def get(self) -> tuple[str, int | None]:
        """The page, and after how many seconds to ask again; None when the run has ended."""
        with self._lock:
            state = self._run.look()
            files = (state.has_ended, *map(_version, (self._run.path / name for name in _NAMES)))
            if state.step < 0:
                return _waiting(state), 1
            if files != self._files and (state.has_ended or time.monotonic() >= self._due):
                began = time.monotonic()
                self._text = page(read_run(self._run.path), _note(state))
                seconds = time.monotonic() - began
                self._files, self._due = files, time.monotonic() + 4 * seconds
                self._reload = max(_RELOAD_SECONDS, math.ceil(5 * seconds))
            return self._text, None if state.has_ended and files == self._files else self._reload


class PageServer(ThreadingHTTPServer):
    """Serves one page on this host's loopback address."""

    daemon_threads = True

    def __init__(self, port: int, get: Callable[[], tuple[str, int | None]]) -> None:
        """Listens.

        Args:
            port: At which port; 0 for any that is free.
            get: Gives the page, and after how many seconds a browser asks again.

        Raises:
            UserError: The port cannot be had.
        """
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "expected a number from 0 to 65535"
            raise UserError(
                f"port {port} of {HOST} cannot be had: {reason}; choose another with --port, or leave it out"
            ) from None
        self.get = get

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0

    def do_GET(self) -> None:
        # A page of elsewhere whose name was made to lead here (DNS rebinding) sends that name.
        known = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if len(hosts := self.headers.get_all("Host", [])) != 1 or hosts[0] not in known:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for browsers of this host")
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(*self.server.get())

    do_HEAD = do_GET

    def _send(self, text: str, reload: int | None) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if reload is not None:
            self.send_header("Refresh", str(reload))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Who asked is not told."""


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _note(state: State) -> str:
    if state.has_ended:
        return "The run has ended."
    return f"As of {time.strftime('%H:%M:%S')}, while the run goes on; the page reloads itself."


def _waiting(state: State) -> str:
    told = tag("p", f"{state.line()[0].upper()}{state.line()[1:]}; this page reloads itself.")
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{policy}<title>paceline watch</title></head>'
        + (f"<body>{told}</body></html>\n")
    )
