"""Both CPU transports against reference sums, and what happens when ranks disagree or vanish."""

from __future__ import annotations

import itertools
import os
import signal
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline.comm.algorithms import ALGORITHMS, traffic
from paceline.comm.plan import shard
from paceline.comm.streams import ThreadStream
from paceline.comm.sums import CHUNK
from paceline.comm.transport import CommunicationError
from paceline.comm.world import open_transport
from tests.ranks import RankError, RankPool

SIZES = (0, 1, 7, 1000, CHUNK + 5)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 6e-2, torch.float16: 8e-3}
MOST_CORES = 4
NAMES = [f"{collective}/{algorithm}" for collective, known in ALGORITHMS.items() for algorithm in known]


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def expected(collective: str, rank: int, inputs: list[Tensor], scale: float) -> tuple[Tensor, slice]:
    """What a collective leaves in a rank's buffer, in fp64, and where that can be relied on."""
    n, numel = len(inputs), inputs[0].numel()
    own, everywhere, nowhere = slice(*shard(rank, n, numel)), slice(0, numel), slice(0, 0)
    exact = [x.double() for x in inputs]
    total = scale * torch.stack(exact).sum(0)
    gathered = torch.cat([exact[peer][slice(*shard(peer, n, numel))] for peer in range(n)])
    crossed = torch.cat([exact[peer][own] for peer in range(n)])
    return {
        "broadcast": (exact[0], everywhere),
        "reduce": (total, nowhere if rank else everywhere),
        "scatter": (exact[0], own),
        "gather": (gathered, nowhere if rank else everywhere),
        "all_gather": (gathered, everywhere),
        "reduce_scatter": (total, own),
        "all_reduce": (total, everywhere),
        "all_to_all": (crossed, everywhere),
        "barrier": (exact[rank], nowhere),
    }[collective]


def run_all(owned: bool, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Every algorithm on every size: right, the same bits the second time, and its plan's bytes."""
    world = pl.init()
    transport = open_transport(world)
    rank, n = world.rank, world.world_size
    problems = []
    rooms = {dtype: transport.allocate(max(SIZES), dtype) for dtype in dtypes}
    for dtype, size, name in itertools.product(dtypes, SIZES, NAMES):
        if n > MOST_CORES and dtype != torch.float32 and size not in (7, 1000):
            # Ranks that take turns on a core are slow.
            continue
        collective = name.partition("/")[0]
        numel = size - size % n if collective == "all_to_all" else size
        inputs = [values(peer, numel, dtype) for peer in range(n)]
        buffer = rooms[dtype][:numel] if owned else torch.empty(numel, dtype=dtype)
        scale = 1 / n if "reduce" in collective else 1.0
        exact, where = expected(collective, rank, inputs, scale)
        results = []
        for _ in range(2 if size == 1000 else 1):
            buffer.copy_(inputs[rank])
            moved = transport.run(name, buffer, "test", scale)
            results.append(buffer[where].clone())
        if not torch.allclose(results[0].double(), exact[where], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]):
            problems.append(f"{name} {dtype} {numel}: wrong values")
        if not torch.equal(results[0], results[-1]):
            problems.append(f"{name} {dtype} {numel}: other bits the second time")
        plan = traffic(name, rank, n, numel)
        if owned and moved != (plan.sent * dtype.itemsize, plan.received * dtype.itemsize):
            problems.append(f"{name} {dtype} {numel}: moved {moved}, plan {plan}")
    transport.close()
    return problems


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("owned", [True, False])
def test_every_algorithm_equals_the_reference_and_moves_its_plans_bytes(ranks, transport, n, owned) -> None:
    assert ranks(n, run_all, owned, DTYPES if owned else DTYPES[:1], transport=transport) == [[]] * n


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [5, 6, 7, 8])
def test_and_so_it_does_with_more_ranks_than_cores(ranks, transport, n) -> None:
    assert ranks(n, run_all, True, DTYPES, transport=transport) == [[]] * n


def cut_differently(collective: str) -> bool:
    """The same gradients reduced in one piece and in many, in float32."""
    world = pl.init()
    transport = open_transport(world)
    numel = 10_007
    whole, pieces = (transport.allocate(numel, torch.float32) for _ in range(2))
    for buffer in (whole, pieces):
        buffer.copy_(values(world.rank, numel, torch.float32))
    transport.run(collective, whole, "whole", 1 / 3)
    for piece in pieces.split(777):
        transport.run(collective, piece, "piece", 1 / 3)
    equal = torch.equal(whole, pieces)
    transport.close()
    return equal


@pytest.mark.parametrize("collective", ["all_reduce", "all_reduce/direct"])
def test_where_a_buffer_is_cut_does_not_change_a_bit(ranks, collective) -> None:
    transport = "auto" if collective == "all_reduce" else "tcp"
    assert ranks(3, cut_differently, collective, transport=transport) == [True] * 3


def low_precision_sum() -> list[float]:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(4, torch.bfloat16)
    buffer.fill_(256.0 if world.rank == 0 else 1.0)
    transport.run("all_reduce", buffer, "test")
    result = buffer.float().tolist()
    transport.close()
    return result


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_bf16_sums_are_accumulated_in_fp32_and_rounded_once(ranks, transport) -> None:
    # 256 + 1 + 1 + 1 = 259, which bf16 rounds to 260; added in bf16 each 1 would be lost.
    assert ranks(4, low_precision_sum, transport=transport) == [[260.0] * 4] * 4


DIFFERENT_CALLS: dict[str, list[tuple[str, int, torch.dtype, str]]] = {
    # What the last rank calls, and what all others do: collective, elements, dtype, label.
    "op": [("broadcast/tree", 64, torch.float32, "bucket 1"), ("all_reduce", 64, torch.float32, "bucket 1")],
    "size": [("all_reduce", 65, torch.float32, "bucket 1"), ("all_reduce", 64, torch.float32, "bucket 1")],
    "dtype": [("all_reduce", 64, torch.float64, "bucket 1"), ("all_reduce", 64, torch.float32, "bucket 1")],
    "bucket": [("all_reduce", 64, torch.float32, "bucket 2"), ("all_reduce", 64, torch.float32, "bucket 1")],
    "root": [("reduce/server", 64, torch.float32, "bucket 1"), ("broadcast/server", 64, torch.float32, "bucket 1")],
}


def disagree(what: str) -> tuple[str, float]:
    world = pl.init()
    transport = open_transport(world)
    buffers = {dtype: transport.allocate(128, dtype) for dtype in (torch.float32, torch.float64)}
    pl.barrier()
    collective, numel, dtype, label = DIFFERENT_CALLS[what][0 if world.rank == world.world_size - 1 else 1]
    start = time.monotonic()
    try:
        transport.run(collective, buffers[dtype][:numel], label)
        # Who got from the root all that it should has nothing to complain of until now.
        transport.run("all_reduce", buffers[torch.float32], "the next call")
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    finally:
        pl.barrier()
        transport.close()
    return "no error", 0.0


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("what", DIFFERENT_CALLS)
def test_ranks_in_different_calls_are_all_told_so_within_2_seconds(ranks, transport, n, what) -> None:
    results = ranks(n, disagree, what, transport=transport)
    assert all("ranks disagree" in message or "is gone" in message for message, _ in results), results
    assert max(seconds for _, seconds in results) < 2
    told = [message for message, _ in results if "ranks disagree" in message]
    (theirs, ours) = DIFFERENT_CALLS[what]
    names = [f"{name} {label} {numel} {str(dtype)[6:]}" for name, numel, dtype, label in (theirs, ours)]
    assert any(all(name in message for name in names) for message in told), results
    assert any(f"rank {n - 1} is in call 1" in message for message in told), results


def die_or_wait() -> tuple[str, float]:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 is gone: rank 0 waited for it in all_reduce bucket 7"):
        transport.run("all_reduce", buffer, "bucket 7")
    raise AssertionError(f"noticed after {time.monotonic() - start:.3f} s")


def test_a_killed_peer_is_noticed_at_once_and_named(ranks) -> None:
    with pytest.raises(RankError, match=r"noticed after 0\.\d+ s"):
        ranks(2, die_or_wait)


def be_silent() -> Any:
    world = pl.init()
    transport = open_transport(replace(world, timeout=1.0))
    buffer = transport.allocate(64, torch.float32)
    if world.rank == 1:
        time.sleep(3)
        transport.close()
        return ""
    with pytest.raises(CommunicationError) as caught:
        transport.run("all_reduce", buffer, "bucket 7")
    transport.close()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_silent_peer_is_named_within_the_time_limit(ranks, transport) -> None:
    assert "rank 1 did not answer within 1 s" in ranks(2, be_silent, transport=transport)[0]


def be_stopped() -> str:
    world = pl.init()
    transport = open_transport(replace(world, timeout=1.0))
    buffer = transport.allocate(64, torch.float32)
    pids = pl.all_gather_json(os.getpid())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        transport.close()
        return ""
    try:
        with pytest.raises(CommunicationError) as caught:
            transport.run("all_reduce", buffer, "bucket 7")
    finally:
        os.kill(pids[1], signal.SIGCONT)
    transport.close()
    return str(caught.value).replace(str(pids[1]), "PID")


def test_a_stopped_peer_is_named_with_what_lets_it_go_on(ranks) -> None:
    message = ranks(2, be_stopped)[0]
    assert "rank 1 did not answer within 1 s" in message
    assert message.endswith("its process PID is stopped: `kill -CONT PID` lets it go on")


def shared_memory_names() -> list[str]:
    world = pl.init()
    transport = open_transport(world)
    transport.allocate(1 << 20, torch.float32)
    names = [entry.name for entry in Path("/dev/shm").iterdir()]
    transport.close()
    return names


def test_shared_buffers_have_no_name(ranks) -> None:
    before = {entry.name for entry in Path("/dev/shm").iterdir()}
    for names in ranks(2, shared_memory_names):
        assert set(names) <= before


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def over_the_wire() -> tuple[int, int]:
    """Bytes that the loopback interface carried for one large all-reduce, and those that were counted."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(4 << 20, torch.float32)
    transport.run("all_reduce", buffer, "warm")
    pl.barrier()
    start = loopback_bytes()
    pl.barrier()
    moved = transport.run("all_reduce", buffer, "test")
    pl.barrier()
    carried = loopback_bytes() - start
    transport.close()
    return carried, moved.sent


def test_counted_bytes_are_what_the_wire_carries(ranks) -> None:
    results = ranks(3, over_the_wire, transport="tcp")
    counted = sum(sent for _, sent in results)
    assert results[0][0] == pytest.approx(counted, rel=0.05)


def close_while_waiting() -> float:
    """Rank 0 waits for a collective that rank 1 never joins, and gives up of its own accord."""
    world = pl.init()
    transport, stream = open_transport(world), ThreadStream("test")
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    start = time.monotonic()
    if world.rank == 0:
        pending = stream.submit(lambda: transport.run("all_reduce", buffer, "bucket 7"), "bucket 7")
        time.sleep(0.2)
        transport.close()
        stream.close()
        assert isinstance(pending.error, CommunicationError)
    pl.barrier()
    stream.close()
    transport.close()
    return time.monotonic() - start


def test_closing_wakes_a_stream_that_waits_for_a_peer(ranks) -> None:
    assert max(ranks(2, close_while_waiting)) < 4


def half_precision_mean() -> list[float]:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(2, torch.float16)
    buffer.fill_(40000.0)
    transport.run("all_reduce", buffer, "test", 0.5)
    result = buffer.tolist()
    transport.close()
    return result


def test_an_fp16_mean_fits_where_its_sum_does_not(ranks) -> None:
    assert ranks(2, half_precision_mean) == [[40000.0] * 2] * 2


def die_and_leave_a_child() -> None:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        transport.run("all_reduce", buffer, "bucket 7")
    raise AssertionError(f"noticed after {time.monotonic() - start:.3f} s")


def test_a_killed_peer_is_noticed_at_once_though_its_child_lives_on(ranks) -> None:
    with pytest.raises(RankError, match=r"noticed after 0\.\d+ s"):
        ranks(2, die_and_leave_a_child)


def between_hosts(collective: str) -> tuple[str, bool, int, str]:
    """Ranks that take themselves for two hosts: shared memory inside, sockets between."""
    world = pl.init()
    with patch("paceline.comm.world._host", lambda: f"host {world.rank // 2}"):
        transport = open_transport(world)
    n, rank = world.world_size, world.rank
    right = True
    for dtype, numel in itertools.product((torch.float64, torch.float32), (8, 1000, 4 * CHUNK)):
        inputs = [values(peer, numel, dtype) for peer in range(n)]
        for owned in (True, False):
            buffer = transport.allocate(numel, dtype) if owned else torch.empty(numel, dtype=dtype)
            buffer.copy_(inputs[rank])
            transport.run(collective, buffer, "test")
            exact, where = expected(collective.partition("/")[0], rank, inputs, 1.0)
            right &= torch.allclose(buffer[where].double(), exact[where], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # A shard beside the buffer, as parameters and reduced gradients have it.
    whole, own = transport.allocate(4 * n, torch.float32), transport.allocate(4, torch.float32)
    own.fill_(rank)
    transport.run("all_gather", whole, "test", shard=own)
    right &= whole.tolist() == [float(peer) for peer in range(n) for _ in range(4)]
    transport.run("reduce_scatter", whole.fill_(rank), "test", 0.5, own)
    right &= own.tolist() == [0.5 * sum(range(n))] * 4
    before = transport.sent_bytes
    transport.run(collective, whole, "test")
    result = transport.name, right, transport.sent_bytes - before, str(transport.why("all_reduce", 25 << 20, True))
    transport.close()
    return result


@pytest.mark.parametrize("n", [3, 4, 6])
def test_ranks_of_several_hosts_share_memory_inside_and_send_between(ranks, n) -> None:
    for collective in ("all_reduce", "all_reduce/direct", "reduce_scatter", "all_gather", "broadcast/tree"):
        for name, right, _, _ in ranks(n, between_hosts, collective):
            alone = "shared memory and tcp" if n != 3 else name
            assert right and name == alone, collective


def test_hierarchical_sends_least_between_hosts(ranks) -> None:
    header = 32 + 448
    sent = {name: ranks(4, between_hosts, f"all_reduce/{name}")[0][2] for name in ("hierarchical", "direct")}
    # 16 elements of 4 bytes: a quarter to the rank of this number on the other host, twice; or to each of its two.
    assert sent == {"hierarchical": 2 * (16 + header), "direct": 4 * (16 + header)}


def left_after_shutdown() -> bool:
    """Whether torch's process group is still held after the job has ended."""
    pl.init()
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    group = weakref.ref(torch.distributed.group.WORLD)
    pl.shutdown()
    return group() is not None


def test_nothing_holds_the_process_group_when_the_job_has_ended() -> None:
    # A thread of it that lives on may abort the interpreter's exit. In new processes: what is imported late matters.
    alone = RankPool()
    try:
        assert alone(2, left_after_shutdown) == [False, False]
    finally:
        alone.close()


def many_small_calls() -> None:
    world = pl.init()
    # Asleep at once, and not looking up by itself: what is not woken stays asleep until the test's time limit.
    with patch("paceline.comm.signals.SPINS", 1), patch("paceline.comm.signals._LOOK_SECONDS", 60.0):
        transport = open_transport(world)
        buffer = transport.allocate(64, torch.float32)
        for _ in range(3000):
            transport.run("all_reduce", buffer, "test")
        transport.close()


@pytest.mark.parametrize("n", [2, 3])
def test_who_sleeps_is_always_woken(ranks, n) -> None:
    ranks(n, many_small_calls, timeout=30)
