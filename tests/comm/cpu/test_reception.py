"""Who is let in at a listening socket, and by whom one is let in."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.comm.authentication import NONCE, TAG, sign
from paceline.comm.cpu import reception
from paceline.comm.cpu.reception import BACKLOG, Reception, introduce

SECRET = b"the job's"
GREETING = 4 + NONCE + TAG


def connected(listener: socket.socket) -> socket.socket:
    connection = socket.create_connection(listener.getsockname())
    connection.settimeout(20)
    return connection


def is_closed_out(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def with_another_secret(stranger: socket.socket) -> None:
    with pytest.raises(OSError):
        introduce(stranger, 1, b"another job's", 20)


def as_one_who_is_not_expected(stranger: socket.socket) -> None:
    with pytest.raises(OSError):
        introduce(stranger, 7, SECRET, 20)


def with_what_a_peer_once_said(stranger: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(bytes(NONCE))
        with contextlib.suppress(OSError):
            introduce(theirs, 1, SECRET, 0.2)
        heard = ours.recv(GREETING, socket.MSG_WAITALL)
    assert len(heard) == GREETING
    stranger.sendall(heard)


def with_what_the_listener_says(stranger: socket.socket) -> None:
    """The tag that a listener makes of the same words is no peer's."""
    nonce = stranger.recv(NONCE, socket.MSG_WAITALL)
    words = (1).to_bytes(4, "little") + bytes(NONCE)
    stranger.sendall(words + sign(SECRET, reception._LISTENER, nonce, words))


def at_great_length(stranger: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stranger.sendall(os.urandom(1 << 22))


@pytest.mark.parametrize(
    "approach",
    [
        with_another_secret,
        as_one_who_is_not_expected,
        with_what_a_peer_once_said,
        with_what_the_listener_says,
        at_great_length,
    ],
)
def test_a_stranger_is_closed_out_and_the_peer_is_let_in_after_it(approach: Callable[[socket.socket], None]) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    hall = Reception(listener, [1], 20, SECRET)
    try:
        with connected(listener) as stranger:
            approach(stranger)
            with contextlib.suppress(OSError):
                stranger.recv(NONCE)
            assert is_closed_out(stranger)
        assert hall.missing == {1}
        with connected(listener) as peer:
            introduce(peer, 1, SECRET, 20)
            assert hall.wait()
            hall.accepted[1].sendall(b"hello")
            assert peer.recv(5, socket.MSG_WAITALL) == b"hello"
    finally:
        hall.close()
        for each in hall.accepted.values():
            each.close()


@contextlib.contextmanager
def listener_that(answers: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """The peer's end of a connection to a listener that does not know the secret."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with contextlib.suppress(OSError):
            answers(theirs)

    thread = threading.Thread(target=run)
    with theirs:
        thread.start()
        with ours:
            yield ours
        thread.join()


def makes_it_up(theirs: socket.socket) -> None:
    theirs.sendall(bytes(NONCE))
    theirs.recv(GREETING, socket.MSG_WAITALL)
    theirs.sendall(bytes(TAG))


def says_it_back(theirs: socket.socket) -> None:
    theirs.sendall(bytes(NONCE))
    theirs.sendall(theirs.recv(GREETING, socket.MSG_WAITALL)[-TAG:])


@pytest.mark.parametrize("answers", [makes_it_up, says_it_back])
def test_a_listener_that_does_not_know_the_secret_is_no_peer(answers: Callable[[socket.socket], None]) -> None:
    with listener_that(answers) as connection, pytest.raises(ConnectionError, match="does not know the job's secret"):
        introduce(connection, 1, SECRET, 20)


def test_a_listener_that_trickles_is_given_up_within_the_time_limit() -> None:
    def trickles(theirs: socket.socket) -> None:
        for _ in range(NONCE - 1):
            theirs.sendall(b"?")
            time.sleep(0.1)
        theirs.recv(1)

    with listener_that(trickles) as connection, pytest.raises(OSError):
        introduce(connection, 1, SECRET, 0.5)
