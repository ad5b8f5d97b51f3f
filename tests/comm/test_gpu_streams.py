"""What is asked of a GPU's streams and events: as few events as can be, and an order over all streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.comm.gpu_streams import CudaClock, CudaStream
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError
from paceline.core.ops import Key, Op
from paceline.executor.executor import Executor
from tests.comm.fake_cuda import DEVICE, FakeCuda, fake_cuda

COPIED = Key("copy_in", "block", 0, "backward")
REDUCED = Key("all_reduce", "bucket 1", 0, "backward")
PUBLISHED = Key("publish", "gradients", 0, "backward")
OPS = [
    Op("copy_in", "block", 0, "backward", "compute"),
    Op("all_reduce", "bucket 1", 0, "backward", "reduce", (COPIED,)),
    Op("publish", "gradients", 0, "backward", "compute", (REDUCED,)),
]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as found:
        yield found


def executor(records: bool) -> Executor:
    return Executor(0, CudaClock(DEVICE), {"reduce": CudaStream(DEVICE)}, lambda op: lambda: Traffic(3, 4), records)


def run(executor: Executor, step: int) -> None:
    executor.load(step, OPS)
    executor.mark(COPIED)
    executor.mark(PUBLISHED)


def test_where_nobody_reads_a_collective_takes_one_event_and_computing_none(cuda: FakeCuda) -> None:
    silent = executor(records=False)
    made, waited = len(cuda.events), cuda.synchronised
    for step in range(3):
        run(silent, step)
    assert cuda.events[made:] == [False] * 3
    assert silent.drain() == [] and cuda.synchronised == waited


def test_ops_are_timed_from_when_that_is_asked_for_until_it_is_no_more(cuda: FakeCuda) -> None:
    some = executor(records=False)
    for step in range(6):
        some.record(step in (2, 3))
        run(some, step)
    found = some.drain()
    assert [(event.step, event.kind) for event in found] == [(step, op.kind) for step in (2, 3) for op in OPS]
    assert all(event.start <= event.end for event in found)
    assert [(event.sent, event.received) for event in found if event.kind == "all_reduce"] == [(3, 4)] * 2
    assert some.drain() == []


def test_what_is_launched_unrecorded_may_be_waited_for_while_recording_and_the_other_way_round(cuda: FakeCuda) -> None:
    some = executor(records=False)
    for step, on in enumerate((False, True, True, False)):
        some.load(step, OPS)
        some.mark(COPIED)
        some.record(on)
        some.mark(PUBLISHED)
    assert [(e.step, e.kind) for e in some.drain()] == [
        *((1, "publish"),),
        *((2, op.kind) for op in OPS),
        *((3, op.kind) for op in OPS[:2]),
    ]


def test_what_is_computed_on_another_stream_comes_after_what_was_before(cuda: FakeCuda) -> None:
    clock, side = CudaClock(DEVICE), cuda.stream()
    clock.now()
    with cuda.on(side):
        clock.now(timed=False)
        clock.now()
    clock.follow()
    assert cuda.waits == [(1, 0), (0, 1)]


def test_a_collective_comes_after_gradients_of_every_stream(cuda: FakeCuda) -> None:
    silent = executor(records=False)
    accumulators, backward = cuda.stream(), cuda.stream()
    with cuda.on(backward):
        silent.load(0, OPS)
        with cuda.on(accumulators):
            silent.follow()
        cuda.waits.clear()
        silent.mark(COPIED)
    (first, *_), (collective, after) = cuda.waits, cuda.waits[-1]
    assert first == (backward.cuda_stream, accumulators.cuda_stream)
    assert after == backward.cuda_stream and collective not in (accumulators.cuda_stream, backward.cuda_stream)


def test_a_graph_is_not_captured(cuda: FakeCuda) -> None:
    silent = executor(records=False)
    cuda.is_capturing = True
    with pytest.raises(EngineError, match=r"CUDA graph is being captured.*outside of torch.cuda.graph"):
        silent.load(0, OPS)
    with cuda.on(cuda.stream()), pytest.raises(EngineError, match="captured"):
        silent.follow()
    cuda.is_capturing = False
    run(silent, 0)
