"""Ranks of one host see how far the others are, whatever became of them since."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.comm.cpu.signals import _ASLEEP, _TEXT, _TEXTS, Signals, text_of
from paceline.comm.transport import CommunicationError


@pytest.fixture
def numbers() -> tuple[int, int]:
    """Of the two ranks."""
    return 0, 1


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, int]) -> Iterator[tuple[Signals, Signals]]:
    """Two ranks in the same call that go to sleep at once when they wait."""
    monkeypatch.setattr("paceline.comm.cpu.signals.SPINS", 0)
    ends = socket.socketpair()
    made: dict[int, Signals] = {}

    def make(place: int) -> None:
        made[place] = Signals(numbers[place], {numbers[1 - place]: ends[place]}, timeout=5)
        made[place].begin(7, text_of("a collective"))

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    yield made[0], made[1]
    for place, end in enumerate(ends):
        made[place].close()
        end.close()


def test_who_came_and_then_aborted_has_come(pair) -> None:
    first, second = pair
    second.publish(2)
    second.abort("something later")
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


@pytest.mark.parametrize("numbers", [(0, 1), (1000, 1001), (7, 1000)])
def test_ranks_of_any_numbers_wake_each_other_and_leave_the_texts_alone(pair, numbers, monkeypatch) -> None:
    # Who is not woken sleeps until the time limit.
    monkeypatch.setattr("paceline.comm.cpu.signals._POLL_SECONDS", 60.0)
    for stage, (sleeper, waker, peer) in enumerate([(*pair, numbers[1]), (*pair[::-1], numbers[0])], 1):
        page, words = waker._pages[peer], waker._words[peer]
        asleep = threading.Thread(target=sleeper.wait, args=(peer, stage))
        asleep.start()
        began = time.monotonic()
        while not any(words[_ASLEEP : _TEXTS // 8]) and time.monotonic() - began < 30:
            time.sleep(0.001)
        assert sum(words[_ASLEEP : _TEXTS // 8]) == 1
        # Of the first call.
        texts = bytes(_TEXT) + text_of("a collective")
        assert page[_TEXTS:] == texts.ljust(len(page) - _TEXTS, b"\0")
        waker.publish(stage)
        asleep.join()
        assert time.monotonic() - began < 30
        assert not any(words[_ASLEEP : _TEXTS // 8])
        assert page[_TEXTS:] == texts.ljust(len(page) - _TEXTS, b"\0")


def test_waiting_leaves_the_processor_to_others(pair) -> None:
    first, second = pair
    later = threading.Timer(0.5, second.publish, (1,))
    later.start()
    began, used = time.monotonic(), time.thread_time()
    first.wait(1, 1)
    assert time.monotonic() - began > 0.4
    assert time.thread_time() - used < 0.1
    later.join()
