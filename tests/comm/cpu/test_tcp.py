"""Messages between two ends of a TCP connection."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.comm.cpu import tcp, tcp_connect
from paceline.comm.cpu.signals import text_of
from paceline.comm.cpu.tcp import TcpConnections
from paceline.comm.transport import CommunicationError

SIZE = 1 << 20
SECRET = b"the job's"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    first.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with first, second:
        yield first, second


def message(size: int) -> bytes:
    head = tcp._HEADER.pack(1, 5, 1, tcp._DATA, size) + text_of("all_reduce bucket 7")
    return head + bytes(range(256)) * (size // 256)


def receive(end: socket.socket, timeout: float, into: bytearray) -> None:
    connections = TcpConnections(0, {1: end}, timeout)
    connections.begin(5, text_of("all_reduce bucket 7"))
    connections.exchange(1, [], [(1, memoryview(into))], lambda: None)


def trickle(end: socket.socket, data: bytes, piece: int, pause: float) -> threading.Thread:
    def send() -> None:
        for start in range(0, len(data), piece):
            end.sendall(data[start : start + piece])
            time.sleep(pause)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many descriptors were ready each time that `poll` came back."""
    seen: list[int] = []

    class Counted:
        def __init__(self) -> None:
            self._poll: Any = real()

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return getattr(self._poll, name)  # type: ignore[no-any-return]

        def poll(self, wait: float) -> list[tuple[int, int]]:
            ready = self._poll.poll(wait)
            seen.append(len(ready))
            return ready  # type: ignore[no-any-return]

    real = select.poll
    monkeypatch.setattr(select, "poll", Counted)
    return seen


def test_a_message_that_comes_in_many_packets_wakes_a_few_times(ends, polls: list[int]) -> None:
    ours, theirs = ends
    into = bytearray(SIZE)
    sender = trickle(theirs, message(SIZE), 4096, 0.001)
    receive(ours, 10, into)
    sender.join()
    assert into == message(SIZE)[-SIZE:]
    # One for the header, one for each 256 KiB and their ends; the packets are 256.
    assert len(polls) < 30


@pytest.mark.full
def test_a_peer_that_sends_slowly_is_not_silent(ends) -> None:
    ours, theirs = ends
    into = bytearray(25_600)
    # Never as much at once as wakes, within the time limit.
    sender = trickle(theirs, message(25_600), 1600, 0.1)
    receive(ours, 0.5, into)
    sender.join()
    assert into == message(25_600)[-25_600:]


def test_a_peer_that_ends_in_the_middle_of_a_message_is_gone(ends) -> None:
    ours, theirs = ends
    theirs.sendall(message(SIZE)[:5000])
    theirs.close()
    with pytest.raises(CommunicationError, match="rank 1 is gone: rank 0 waited for it in all_reduce bucket 7"):
        receive(ours, 10, bytearray(SIZE))


def test_a_peer_that_stops_in_the_middle_of_a_message_is_silent(ends) -> None:
    ours, theirs = ends
    theirs.sendall(message(SIZE)[:5000])
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=r"rank 1 did not answer within 0\.5 s"):
        receive(ours, 0.5, bytearray(SIZE))
    assert time.monotonic() - began < 30


def connected_past(approach: Callable[[int], list[socket.socket]]) -> tuple[socket.socket, socket.socket]:
    """The ends of a connection of two ranks, where strangers come to rank 0's port before rank 1 does.

    Args:
        approach: Given the port; the strangers' sockets that it returns stay open until the ranks are connected.
    """
    told: dict[int, Any] = {}
    meet = threading.Barrier(2)
    strangers: list[socket.socket] = []
    found: dict[int, dict[int, socket.socket]] = {}

    def connect(rank: int) -> None:
        def gather(value: Any, label: str) -> list[Any]:
            told[rank] = value
            meet.wait()
            if rank == 1:
                strangers.extend(approach(told[0][1]))
            return [told[0], told[1]]

        (found[rank],) = tcp_connect.connect(rank, [[0, 1]], [[1 - rank]], gather, 10, SECRET)

    other = threading.Thread(target=connect, args=(1,))
    other.start()
    try:
        connect(0)
    finally:
        other.join()
        for stranger in strangers:
            stranger.close()
    return found[0][1], found[1][0]


def reset(port: int) -> list[socket.socket]:
    """Comes, and goes away without a goodbye."""
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    return []


def leave(port: int) -> list[socket.socket]:
    """Comes, and goes away again."""
    socket.create_connection(("127.0.0.1", port)).close()
    return []


def stay(port: int) -> list[socket.socket]:
    """Comes, and says nothing."""
    return [socket.create_connection(("127.0.0.1", port))]


def stay_after_a_word(port: int) -> list[socket.socket]:
    """Comes, and says less than a rank would."""
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"\1\0")
    return [stranger]


def many(port: int) -> list[socket.socket]:
    """More than are heard at once."""
    return [stranger for _ in range(100) for stranger in (*stay(port), *stay_after_a_word(port))]


def drip(port: int) -> list[socket.socket]:
    """Come, and say a byte now and then for as long as they may."""
    strangers = [stranger for _ in range(5) for stranger in stay(port)]

    def say() -> None:
        with contextlib.suppress(OSError):
            for _ in range(30):
                for stranger in strangers:
                    stranger.sendall(b"?")
                time.sleep(0.5)

    threading.Thread(target=say, daemon=True).start()
    return strangers


@pytest.mark.parametrize("approach", [reset, leave, stay, stay_after_a_word, many, drip])
def test_strangers_that_say_too_little_do_not_stop_ranks_from_meeting(approach) -> None:
    first, second = connected_past(approach)
    with first, second:
        first.sendall(b"hello")
        assert second.recv(5, socket.MSG_WAITALL) == b"hello"
