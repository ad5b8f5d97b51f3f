"""Streams and events of a GPU: what runs where, after what, and when."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import paceline as pl
from paceline.comm.gpu_streams import CudaClock, CudaStream
from paceline.comm.nccl import NcclTransport
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError
from paceline.core.ops import Key, Op
from paceline.core.strategy import Strategy
from paceline.executor.executor import Executor
from tests.gpu.devices import late_collectives, on_a_gpu, on_two_gpus, ranks_on_gpus
from tests.gpu.loop import batches, make

pytestmark = on_a_gpu

TICK = 1e-4
"""Seconds that two streams' events may seem to be out of order."""

LONG = 20_000_000
"""Cycles that take some ten milliseconds."""


@pytest.fixture
def nccl(gpu: torch.device, tmp_path: Path) -> Iterator[NcclTransport]:
    """NCCL among one rank."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=gpu)
    yield NcclTransport(dist.group.WORLD, gpu)  # type: ignore[arg-type]
    # The fixture before this one ends it.


def slow(work: Callable[[], object]) -> Callable[[], Traffic]:
    def run() -> Traffic:
        torch.cuda._sleep(LONG)
        work()
        return Traffic(1, 1)

    return run


def test_a_stream_runs_behind_what_was_computed_and_is_waited_for_by_the_gpu(gpu: torch.device) -> None:
    stream, x = CudaStream(gpu), torch.ones(1000, device=gpu)
    # A kernel is loaded when it first runs, for which the host waits.
    x.fill_(2).mul_(0)
    torch.cuda._sleep(LONG)
    x.fill_(1)
    pending = stream.submit(slow(lambda: x.mul_(3)), "bucket 1")
    assert not pending.end.query(), "the host waited"
    stream.wait(pending)
    assert not pending.end.query(), "the host waited"
    assert (x + 1).eq(4).all()
    assert stream.close()


def test_streams_run_in_order_and_behind_each_other(gpu: torch.device) -> None:
    first, second, x = CudaStream(gpu), CudaStream(gpu), torch.zeros(1000, device=gpu)
    first.is_timed = second.is_timed = True
    one = first.submit(slow(lambda: x.add_(1)), "bucket 1")
    two = first.submit(slow(lambda: x.mul_(10)), "bucket 2")
    three = second.submit(slow(lambda: x.add_(5)), "bucket 3", [two])
    second.wait(three)
    assert x.eq(15).all()
    clock = CudaClock(gpu)
    marks = [clock.seconds(mark) for pending in (one, two, three) for mark in (pending.start, pending.end)]
    # The third may be submitted, and so start, before the second is over; it ends last.
    assert marks[0] < marks[1] <= marks[2] + TICK and marks[2] < marks[3] < marks[5]


def test_an_executors_events_are_in_the_order_that_ops_ask_for(nccl: NcclTransport, gpu: torch.device) -> None:
    buffer = nccl.allocate(1 << 20, torch.float32)
    copied = Key("copy_in", "block", 0, "backward")
    reduced = Key("all_reduce", "bucket 1", 0, "backward")
    again = Key("all_reduce", "bucket 2", 0, "backward")
    ops = [
        Op("copy_in", "block", 0, "backward", "compute"),
        Op("all_reduce", "bucket 1", 0, "backward", "reduce", (copied,)),
        Op("all_reduce", "bucket 2", 0, "backward", "statistics", (reduced,)),
        Op("publish", "gradients", 0, "backward", "compute", (again,)),
    ]

    def work(op: Op) -> Callable[[], Traffic]:
        return lambda: nccl.run("all_reduce", buffer, op.target, 2.0)

    executor = Executor(0, CudaClock(gpu), {"reduce": CudaStream(gpu), "statistics": CudaStream(gpu)}, work)
    with late_collectives():
        executor.load(0, ops)
        executor.begin(copied)
        torch.cuda._sleep(LONG)
        buffer.fill_(1)
        executor.end()
        executor.done(copied)
        executor.begin(Key("publish", "gradients", 0, "backward"))
        found = buffer + 0
        executor.end()
        executor.settle()
    assert found.eq(4).all()
    copy_in, first, second, publish = executor.drain()
    assert [event.kind for event in (copy_in, first, second, publish)] == [op.kind for op in ops]
    for event in (copy_in, first, second, publish):
        assert event.end >= event.start
    assert first.start >= copy_in.end - TICK and second.end >= first.end - TICK and publish.start >= second.end - TICK
    assert second.exposed > 0


def streams_of(run: Callable[[], object], path: Path) -> dict[str, set[int]]:
    """The CUDA streams that kernels ran on, by the kernels' names."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    found.export_chrome_trace(str(path))
    streams: dict[str, set[int]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            streams.setdefault(event["name"], set()).add(event["args"]["stream"])
    return streams


def test_the_profiler_sees_collectives_on_other_streams(gpu: torch.device, tmp_path: Path) -> None:
    stream, x, y = CudaStream(gpu), torch.ones(1 << 16, device=gpu), torch.ones(1 << 16, device=gpu)

    def run() -> None:
        x.cos_()
        stream.wait(stream.submit(lambda: Traffic(int(y.sin_().numel()), 0), "bucket 1"))

    streams = streams_of(run, tmp_path / "trace.json")
    cos, sin = (set().union(*(s for name, s in streams.items() if what in name)) for what in ("cos", "sin"))
    assert cos and sin and cos.isdisjoint(sin)


# ---- a whole engine's


def events_of_steps(strategy: Strategy) -> list[list[Any]]:
    device = pl.init().device
    model = pl.parallelize(make(torch.float64, device), strategy)
    pl.engine_of(model).record_events()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for x, y in batches(torch.float64, device):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pl.engine_of(model).settle()
    found = pl.engine_of(model).drain_events()
    pl.release(model)
    return [[e.step, e.stream, e.kind, e.start, e.end] for e in found]


def assert_in_order(events: list[list[Any]]) -> None:
    assert events
    for stream in {event[1] for event in events}:
        mine = [event for event in events if event[1] == stream]
        for _, _, kind, start, end in mine:
            assert end >= start, kind
        for earlier, later in itertools.pairwise(mine):
            assert later[3] >= earlier[4] - TICK, (earlier, later)
    by_step: deque[float] = deque()
    for step in sorted({event[0] for event in events}):
        by_step.append(min(event[3] for event in events if event[0] == step))
    assert list(by_step) == sorted(by_step)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_events_of_one_rank_have_increasing_times(gpu: torch.device, precision: Any) -> None:
    strategy = Strategy(precision=precision)
    if precision == "float32":
        assert_in_order(events_of_steps(strategy))
    else:
        model = pl.parallelize(make(torch.float32, gpu), strategy)
        pl.engine_of(model).record_events()
        for _ in range(3):
            model(torch.ones(2, 4, device=gpu)).float().square().mean().backward()
        found = pl.engine_of(model).drain_events()
        pl.release(model)
        assert_in_order([[e.step, e.stream, e.kind, e.start, e.end] for e in found])


@on_two_gpus
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_events_of_two_ranks_have_increasing_times_on_every_stream(zero: Any) -> None:
    for events in ranks_on_gpus(2, events_of_steps, Strategy(zero=zero, bucket_mb=1e-3)):
        assert_in_order(events)
        assert {"compute", "reduce"} <= {event[1] for event in events}


def profiled(strategy: Strategy, path: str) -> dict[str, set[int]]:
    device = pl.init().device
    model = pl.parallelize(make(torch.float32, device), strategy)
    x: Tensor = torch.ones(4, 4, device=device)
    model(x).sum().backward()

    def run() -> None:
        model(x).sum().backward()

    found = streams_of(run, Path(path) / f"{pl.init().rank}.json")
    pl.release(model)
    return found


@on_two_gpus
def test_the_profiler_sees_nccl_on_other_streams_than_the_models(tmp_path: Path) -> None:
    for streams in ranks_on_gpus(2, profiled, Strategy(zero=2, bucket_mb=1e-3), str(tmp_path)):
        nccl = set().union(*(found for name, found in streams.items() if "nccl" in name.lower()))
        model = set().union(*(found for name, found in streams.items() if "gemm" in name.lower()))
        assert nccl and nccl.isdisjoint(model)


# ---- streams of the program's own


def on_a_side_stream(strategy: Strategy) -> dict[str, Any]:
    """Trains on one stream and then on another, with graphs of the first still there."""
    device = pl.init().device
    model = pl.parallelize(make(torch.float64, device), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    side, kept = torch.cuda.Stream(device), []
    for step, (x, y) in enumerate(batches(torch.float64, device)):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()), late_collectives(step):
            loss = (model(x) - y).square().mean()
            kept.append(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    pl.release(model)
    return found


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_program_may_change_streams(gpu: torch.device, zero: Any) -> None:
    model = make(torch.float64, gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches(torch.float64, gpu):
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = on_a_side_stream(Strategy(zero=zero, bucket_mb=1e-3, precision="float32"))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value.cpu(), atol=1e-11, rtol=0, msg=name)


def test_a_step_is_not_captured_into_a_graph(gpu: torch.device) -> None:
    model = pl.parallelize(make(torch.float32, gpu))
    model(torch.ones(2, 4, device=gpu)).sum().backward()
    with pytest.raises(EngineError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(torch.ones(2, 4, device=gpu))
    pl.release(model)


def test_only_what_is_recorded_is_timed(gpu: torch.device) -> None:
    model = pl.parallelize(make(torch.float32, gpu))
    engine = pl.engine_of(model)
    for on in (False, True, False):
        engine.record_events(on)
        model(torch.ones(2, 4, device=gpu)).sum().backward()
    assert {event.micro_batch for event in engine.drain_events()} and not engine.drain_events()
    pl.release(model)
