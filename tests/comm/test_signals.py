"""Ranks of one host see how far the others are, whatever became of them since."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.comm.signals import Signals, text_of
from paceline.comm.transport import CommunicationError


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Signals, Signals]]:
    """Two ranks in the same call that go to sleep at once when they wait."""
    monkeypatch.setattr("paceline.comm.signals.SPINS", 0)
    ends = socket.socketpair()
    made: dict[int, Signals] = {}

    def make(rank: int) -> None:
        made[rank] = Signals(rank, {1 - rank: ends[rank]}, timeout=5)
        made[rank].begin(7, text_of("a call"))

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    yield made[0], made[1]
    for signals, end in zip(made.values(), ends, strict=True):
        signals.close()
        end.close()


def test_who_came_and_then_gave_up_has_come(pair) -> None:
    first, second = pair
    second.publish(2)
    second.give_up("something later")
    first.wait(1, 2)
    with pytest.raises(CommunicationError, match="rank 1 gave up: something later"):
        first.wait(1, 3)


def test_who_came_and_then_left_has_come(pair) -> None:
    first, second = pair
    second.publish(2)
    second.close()
    first.wait(1, 2)
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        first.wait(1, 3)
