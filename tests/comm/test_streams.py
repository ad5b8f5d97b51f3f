"""What a stream's thread runs, raises and holds on to."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

import paceline as pl
from paceline.comm.streams import Done, ThreadStream, others_idle
from paceline.comm.transport import CommunicationError
from paceline.core.collectives.rounds import Traffic


class Model:
    """What a collective's function belongs to."""

    def communicate(self) -> Traffic:
        return Traffic(1, 2)

    def fail(self) -> Traffic:
        raise ValueError("a broken model")


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_waits_for_the_next_collective_holds_nothing_of_the_last(fails: bool) -> None:
    stream = ThreadStream("test")
    model = Model()
    collected = weakref.ref(model)
    pending = stream.submit(model.fail if fails else model.communicate, "bucket 1")
    pending.done.wait()
    assert (pending.error is not None) == fails
    del model, pending
    gc.collect()
    try:
        assert collected() is None
    finally:
        stream.close()


def test_after_a_failure_the_first_cause_is_what_every_later_collective_raises() -> None:
    stream = ThreadStream("test")
    first = stream.submit(Model().fail, "bucket 1")
    second, third = (stream.submit(Model().communicate, f"bucket {number}") for number in (2, 3))
    with pytest.raises(ValueError, match="a broken model"):
        stream.wait(first)
    for later in (second, third):
        with pytest.raises(CommunicationError, match=r"^ValueError: a broken model$"):
            stream.wait(later)
    stream.close()


def test_whoever_waits_for_a_collective_goes_on_once_it_is_over_and_not_before() -> None:
    done, gone_on = Done(), threading.Barrier(4)
    waiting = [threading.Thread(target=lambda: (done.wait(), gone_on.wait())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    assert not done.is_set() and gone_on.n_waiting == 0
    done.set()
    gone_on.wait(10)
    assert done.is_set()
    done.wait()
    for thread in waiting:
        thread.join(10)


@pytest.mark.parametrize("end", [ThreadStream.close, ThreadStream.abandon])
def test_one_that_is_ended_while_it_works_is_idle_once_it_has(end: Callable[[ThreadStream], object]) -> None:
    stream, goes_on = ThreadStream("test"), threading.Event()

    def work() -> Traffic:
        goes_on.wait()
        return Traffic(1, 2)

    stream.submit(work, "bucket 1")
    ending = threading.Thread(target=end, args=(stream,))
    ending.start()
    while not stream._closed or stream._queue.empty():
        time.sleep(0.001)
    assert not others_idle()
    goes_on.set()
    ending.join()
    stream._thread.join()
    assert others_idle(), "which pl.shutdown() waits for, and without which no deadlock is found"


def test_a_stream_may_be_closed_by_the_garbage_collector_in_its_own_thread() -> None:
    stream = ThreadStream("test")
    closed: list[bool] = []

    def close() -> Traffic:
        closed.append(stream.close())
        return Traffic(0, 0)

    stream.wait(stream.submit(close, "bucket 1"))
    assert closed == [True] and stream.close()


def resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def drop_models() -> tuple[tuple[int, int], tuple[int, int]]:
    """Threads and open descriptors when four of 30 models were trained once and dropped, and when all were."""
    first = (0, 0)
    for index in range(30):
        model = pl.parallelize(torch.nn.Linear(4, 2), pl.Strategy(zero=index % 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        del model, optimizer
        if index == 3:
            first = resources()
    last = resources()
    deadline = time.monotonic() + 60
    while last > first and time.monotonic() < deadline:
        # A collective that was under way holds its model until it is over.
        time.sleep(0.05)
        last = resources()
    return first, last


def test_dropped_models_leave_no_threads_and_no_descriptors(ranks) -> None:
    for first, last in ranks(2, drop_models):
        assert last <= first
