"""The executor runs what was loaded, each op after what it comes after, and refuses any other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.comm.streams import HostClock, ThreadStream
from paceline.core.collectives.rounds import Traffic
from paceline.core.ops import PREVIOUS, Key, Op
from paceline.executor.executor import Executor

COPY = Op("copy_in", "u0", 0, "backward", "compute")
REDUCE = Op("all_reduce", "bucket 0", 0, "backward", "reduce", after=(COPY.key,))
REPLICATE = Op("all_reduce", "bucket 0", 0, "update", "replicate", after=(REDUCE.key,))
LATER_COPY = Op("copy_in", "u1", 0, "backward", "compute")
LATER = Op("all_reduce", "bucket 1", 0, "backward", "reduce", after=(LATER_COPY.key,))
LEFT = REDUCE.key._replace(micro_batch=PREVIOUS)
COMPLETE = LATER.key._replace(micro_batch=PREVIOUS)
UNKNOWN = Key("all_reduce", "bucket 9", 0, "backward")


@pytest.fixture
def ran() -> list[Key]:
    return []


@pytest.fixture
def executor(ran: list[Key]) -> Iterator[Executor]:
    streams = {name: ThreadStream(name) for name in ("reduce", "replicate")}

    def run(op: Op) -> Traffic:
        ran.append(op.key)
        return Traffic(0, 0)

    yield Executor(0, HostClock(), streams, lambda op: lambda: run(op), of_step_before={LEFT, COMPLETE})
    for stream in streams.values():
        stream.close()


def test_a_collective_runs_once_what_it_comes_after_is_done(executor: Executor, ran: list[Key]) -> None:
    executor.load(0, [COPY, REDUCE])
    executor.begin(COPY.key)
    executor.end()
    assert not executor.launched.take()
    executor.done(COPY.key)
    assert executor.launched.take()
    executor.settle()
    assert ran == [REDUCE.key]


def test_what_is_in_no_schedule_cannot_run_nor_be_waited_for(executor: Executor) -> None:
    executor.load(0, [COPY, REDUCE])
    with pytest.raises(RuntimeError, match="in no schedule that was loaded"):
        executor.require([UNKNOWN])
    for call in (executor.begin, executor.done, executor.after):
        with pytest.raises(RuntimeError, match="in no schedule that was loaded"):
            call(UNKNOWN)


def test_what_the_step_before_left_is_waited_for_and_what_it_did_is_over(executor: Executor, ran: list[Key]) -> None:
    executor.load(0, [COPY, REDUCE])
    executor.done(COPY.key)
    executor.load(1, [])
    executor.require([LEFT, COMPLETE])
    assert ran == [REDUCE.key]
    for of_no_step in (REDUCE.key, UNKNOWN._replace(micro_batch=PREVIOUS)):
        with pytest.raises(RuntimeError, match="in no schedule that was loaded"):
            executor.require([of_no_step])


def test_a_compute_op_that_has_not_run_cannot_be_waited_for(executor: Executor) -> None:
    executor.load(0, [COPY])
    with pytest.raises(RuntimeError, match="has not run"):
        executor.require([COPY.key])


def test_what_a_rank_skips_counts_as_done_and_all_before_it_is_launched_in_order(
    executor: Executor, ran: list[Key]
) -> None:
    executor.load(0, [COPY, REDUCE, REPLICATE, LATER_COPY, LATER])
    executor.require([LATER.key])
    assert ran[0] == REDUCE.key
    executor.settle()
    assert {*ran} == {REDUCE.key, REPLICATE.key, LATER.key}
    assert ran.index(LATER.key) > ran.index(REDUCE.key)


def test_only_what_comes_before_is_skipped(executor: Executor, ran: list[Key]) -> None:
    executor.load(0, [COPY, REDUCE, LATER_COPY, LATER])
    executor.require([REDUCE.key])
    assert ran == [REDUCE.key]
    assert {event.kind for event in executor.drain()} == {"all_reduce"}


def test_what_was_skipped_on_another_stream_is_launched_too(executor: Executor, ran: list[Key]) -> None:
    executor.load(0, [COPY, REDUCE, REPLICATE])
    executor.require([REPLICATE.key])
    assert ran == [REDUCE.key, REPLICATE.key]


def test_what_was_skipped_and_runs_after_all_was_planned_and_what_runs_again_was_not(executor: Executor) -> None:
    executor.load(0, [COPY, REDUCE])
    executor.require([REDUCE.key])
    executor.mark(COPY.key)
    executor.mark(COPY.key)
    assert [event.planned for event in executor.drain() if event.kind == "copy_in"] == [True, False]


def test_each_of_many_micro_batches_takes_as_much_looking_up_as_the_first(executor: Executor) -> None:
    looked_up = 0

    class Unit(str):
        def __hash__(self) -> int:
            nonlocal looked_up
            looked_up += 1
            return super().__hash__()

    taken = []
    for micro_batch in range(20):
        before = looked_up
        executor.load(0, [Op("copy_in", Unit("u0"), micro_batch, "backward", "compute")])
        executor.complete()
        taken.append(looked_up - before)
    assert taken == taken[:1] * 20
