"""A rank process of `paceline bench comm`: does what the controller asks for, and sleeps until then."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from paceline.bench.comm.calls import ESTIMATE_REPEATS, Call, Library, check, come_late, seconds

ADDRESS = "PACELINE_BENCH_ADDRESS"
"""Environment variable with the controller's socket."""


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Sends a message as JSON."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Waits for a message.

    Raises:
        EOFError: The other side is gone.
    """
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


def connect() -> Connection:
    """This rank's connection to the controller that started it."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(os.environ[ADDRESS])
    return Connection(link.detach())


def serve(
    connection: Connection, rank: int, ranks: int, libraries: Sequence[Library], missing: Mapping[str, str]
) -> None:
    """Answers the controller until it goes.

    Args:
        connection: From `connect`.
        rank: This rank.
        ranks: Size of the group.
        libraries: What this group can run.
        missing: What it cannot, with the reason.
    """
    offered = {library.name: {op: list(names) for op, names in library.algorithms.items()} for library in libraries}
    by_name = {library.name: library for library in libraries}
    calls: dict[tuple[str, str], Call] = {}
    try:
        hello = {"rank": rank, "ranks": ranks, "pid": os.getpid(), "offered": offered, "missing": dict(missing)}
        send(connection, hello)
        while True:
            request = receive(connection)
            try:
                answer = _answer(request, rank, ranks, by_name, calls)
            except Exception as error:
                # Any library's: the others' figures are worth having without it.
                lines = str(error).strip().splitlines()
                answer = {"error": f"{type(error).__name__}: {lines[0] if lines else 'no message'}"}
            send(connection, answer)
    except (EOFError, ConnectionError):
        return


def _answer(
    request: Mapping[str, Any],
    rank: int,
    ranks: int,
    libraries: Mapping[str, Library],
    calls: dict[tuple[str, str], Call],
) -> dict[str, Any]:
    key = (request["library"], request["algorithm"])
    if "repeats" in request:
        return {"seconds": seconds(calls[key], request["repeats"])}
    op, numel = request["op"], request["numel"]
    calls.pop(key, None)
    call = libraries[key[0]].call(op, key[1], numel)
    checked: dict[str, Any]
    if op == "barrier":
        came, left = come_late(call, rank, ranks)
        checked = {"came": came, "left": left}
    else:
        checked = {"wrong": check(call, op, rank, ranks, numel)}
    calls[key] = call
    return {**checked, "seconds": seconds(call, ESTIMATE_REPEATS)}
