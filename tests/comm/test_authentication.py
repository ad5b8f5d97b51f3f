"""Messages that only the two who know a secret can exchange."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from paceline.comm.authentication import MOST_BYTES, TAG, SignedMessages, is_signed, sign

SECRET = b"the job's"


@pytest.fixture
def ends() -> Iterator[tuple[SignedMessages, socket.socket]]:
    """What hears rank 1, and the bare end of the connection that says something to it."""
    ours, theirs = socket.socketpair()
    heard = SignedMessages(ours, SECRET, "rank 0", "rank 1")
    yield heard, theirs
    heard.close()
    theirs.close()


def frame(number: int, body: bytes, who: bytes = b"rank 1", secret: bytes = SECRET) -> bytes:
    return struct.pack("<I", len(body)) + sign(secret, who, struct.pack("<I", number), body) + body


def test_messages_arrive_in_order_however_they_are_cut(ends: tuple[SignedMessages, socket.socket]) -> None:
    heard, theirs = ends
    said = [{"place": "é"}, [1, None], "x" * 5000]
    data = b"".join(frame(number, json.dumps(value).encode()) for number, value in enumerate(said))
    values = []
    assert heard.receive() == []
    for start in range(0, len(data), 7):
        theirs.sendall(data[start : start + 7])
        values += heard.receive()
    assert values == said


def test_two_ends_understand_each_other() -> None:
    ours, theirs = socket.socketpair()
    first, second = SignedMessages(ours, SECRET, "rank 0", "rank 1"), SignedMessages(theirs, SECRET, "rank 1", "rank 0")
    for number in range(3):
        first.send(number)
        second.send([number])
    assert (second.receive(), first.receive()) == ([0, 1, 2], [[0], [1], [2]])
    second.close()
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        first.receive()
    first.close()


FORGED: dict[str, Callable[[], bytes]] = {
    "another secret": lambda: frame(0, b"1", secret=b"another job's"),
    "said again": lambda: frame(0, b"1") * 2,
    "one left out": lambda: frame(1, b"1"),
    "its own words said back": lambda: frame(0, b"1", who=b"rank 0"),
    "changed": lambda: frame(0, b"1")[:-1] + b"2",
    "unsigned": lambda: struct.pack("<I", 1) + bytes(TAG) + b"1",
    "too long": lambda: struct.pack("<I", MOST_BYTES + 1) + bytes(TAG),
}


@pytest.mark.parametrize("how", FORGED)
def test_what_the_other_end_did_not_say_ends_the_connection(
    ends: tuple[SignedMessages, socket.socket], how: str
) -> None:
    heard, theirs = ends
    theirs.sendall(FORGED[how]())
    with pytest.raises(ConnectionError, match=r"did not sign|at most"):
        heard.receive()


def test_who_takes_nothing_holds_nobody_up(ends: tuple[SignedMessages, socket.socket]) -> None:
    heard, _ = ends
    with pytest.raises(ConnectionError, match="rank 1 takes no message"):
        for _ in range(10_000):
            heard.send("x" * 10_000)


def test_a_message_is_bounded(ends: tuple[SignedMessages, socket.socket]) -> None:
    with pytest.raises(ConnectionError, match=f"at most {MOST_BYTES}"):
        ends[0].send("x" * MOST_BYTES)


def test_parts_are_signed_where_they_are_cut() -> None:
    assert not is_signed(sign(SECRET, b"ab", b"c"), SECRET, b"a", b"bc")
