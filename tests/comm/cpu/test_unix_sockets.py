"""Connections between the ranks of one host: strangers cannot enter, nor keep ranks out."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm.cpu import unix_sockets
from paceline.comm.cpu.reception import introduce

NOBODY = 65534
SECRET = b"the job's"
# Connects as another user, greets as rank 1 would, and says what it reads.
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
stranger.settimeout(20)
stranger.connect("\\0" + sys.argv[1])
print(os.getuid(), flush=True)
try:
    stranger.sendall(bytes(52))
    print(stranger.recv(5))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""


def told_in_one_run() -> str:
    """Where rank 0 of two listens, as it tells rank 1, which never comes."""
    told: list[str] = []

    def gather(value: Any, label: str) -> list[Any]:
        told.append(value)
        return [value, False]

    # What else is random in a training run begins with the same seed each time.
    random.seed(0)
    torch.manual_seed(0)
    assert unix_sockets.connect(0, [[0, 1]], gather, 5, SECRET) is None
    return told[0]


def test_addresses_leave_no_file_and_cannot_be_guessed() -> None:
    told = [told_in_one_run() for _ in range(40)]
    assert all(re.fullmatch(r"\0paceline-[0-9a-f]{32}", address) for address in told)
    numbers = [int(address[-32:], 16) for address in told]
    for bit in range(128):
        # 40 bits that are all the same come up once in 2^39 times.
        assert len({number >> bit & 1 for number in numbers}) == 2, f"bit {bit} is always the same"


@contextmanager
def two_ranks(before_rank_1: Callable[[str], None]) -> Iterator[list[socket.socket]]:
    """Both ends of the connection between two ranks; `before_rank_1` gets where rank 0 listens."""
    told: dict[int, Any] = {}
    meet = threading.Barrier(2)
    found: dict[int, dict[int, socket.socket]] = {}

    def rank_of(rank: int) -> None:
        def gather(value: Any, label: str) -> list[Any]:
            told[rank] = value
            meet.wait(20)
            values = [told[0], told[1]]
            if rank == 1 and isinstance(values[0], str):
                before_rank_1(values[0])
            meet.wait(20)
            return values

        connected = unix_sockets.connect(rank, [[0, 1]], gather, 10, SECRET)
        assert connected is not None
        (found[rank],) = connected

    other = threading.Thread(target=rank_of, args=(1,))
    other.start()
    try:
        rank_of(0)
    finally:
        other.join()
    first, second = found[0], found[1]
    with first[1], second[0]:
        yield [first[1], second[0]]


def say_hello(ends: list[socket.socket]) -> bytes:
    for end in ends:
        end.settimeout(5)
    ends[0].sendall(b"hello")
    return ends[1].recv(5, socket.MSG_WAITALL)


def test_a_connection_of_another_user_is_closed_out() -> None:
    """It comes first, even knows the secret, and is not taken for rank 1."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(5)

    def intrude(address: str) -> None:
        stranger.connect(address)
        with pytest.raises(OSError):
            introduce(stranger, 1, SECRET, 5)

    # As if rank 0 belonged to another user than the first that connects; the second is rank 1.
    users = [os.getuid() + 1, os.getuid()]
    with stranger, patch("paceline.comm.cpu.unix_sockets.os.getuid", side_effect=users), two_ranks(intrude) as ends:
        assert say_hello(ends) == b"hello"


def test_who_has_read_the_address_but_not_the_secret_is_closed_out() -> None:
    """All users can list abstract addresses."""

    def intrude(address: str) -> None:
        assert address[1:] in Path("/proc/net/unix").read_text()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(address)
            with pytest.raises(OSError, match=r"did not say|reset|[Bb]roken pipe"):
                introduce(stranger, 1, SECRET[:-1] + b"?", 20)
        tried.append(address)

    tried: list[str] = []
    with two_ranks(intrude) as ends:
        assert say_hello(ends) == b"hello"
    assert len(tried) == 1


@pytest.mark.parametrize("greeting", [b"", b"\1\0"])
def test_strangers_that_come_and_wait_keep_nobody_out(greeting: bytes) -> None:
    """However many, and whether they say nothing or too little."""
    strangers: list[socket.socket] = []

    def intrude(address: str) -> None:
        for _ in range(200):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            strangers.append(stranger)
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.connect(address)
                stranger.sendall(greeting)

    with two_ranks(intrude) as ends:
        assert say_hello(ends) == b"hello"
    for stranger in strangers:
        stranger.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_closed_out() -> None:
    strangers: list[subprocess.Popen[str]] = []

    def intrude(address: str) -> None:
        command = [sys.executable, "-c", STRANGER, address[1:], str(NOBODY)]
        stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        strangers.append(stranger)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == f"{NOBODY}\n", "it has connected"

    with two_ranks(intrude) as ends:
        assert say_hello(ends) == b"hello"
        stranger = strangers[0]
        assert stranger.stdout is not None
        assert (stranger.stdout.read(), stranger.wait(20)) == ("b''\n", 0)
