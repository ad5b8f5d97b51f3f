"""Both CPU transports against reference sums, and what happens when ranks disagree or vanish."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.comm.plan import PLANS, traffic
from paceline.comm.streams import ThreadStream
from paceline.comm.transport import CHUNK, CommunicationError
from paceline.comm.world import open_transport
from tests.ranks import RankError

SIZES = (0, 1, 7, 1000, 3 * CHUNK + 5)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def run_all(owned: bool) -> list[str]:
    world = pl.init()
    transport = open_transport(world)
    rank, n = world.rank, world.world_size
    problems = []
    for dtype in DTYPES:
        for numel in SIZES:
            inputs = [values(peer, numel, dtype) for peer in range(n)]
            exact = sum(x.double() for x in inputs)
            buffer = transport.allocate(numel, dtype) if owned else torch.empty(numel, dtype=dtype)
            for collective in sorted(PLANS):
                buffer.copy_(inputs[rank])
                moved = transport.run(collective, buffer, "test", 0.5 if "reduce" in collective else 1.0)
                if collective.endswith("all_reduce") or (collective.endswith("reduce") and rank == 0):
                    expected = 0.5 * exact
                elif collective.endswith("broadcast"):
                    expected = inputs[0].double()
                else:
                    continue
                tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
                if not torch.allclose(buffer.double(), expected, rtol=tolerance, atol=tolerance):
                    problems.append(f"{collective} {dtype} {numel}: wrong values")
                plan = traffic(collective, rank, n, numel)
                if owned and moved != (plan.sent * dtype.itemsize, plan.received * dtype.itemsize):
                    problems.append(f"{collective} {dtype} {numel}: moved {moved}, plan {plan}")
    transport.close()
    return problems


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("owned", [True, False])
def test_every_collective_equals_the_reference_and_moves_its_plans_bytes(ranks, transport, n, owned) -> None:
    assert ranks(n, run_all, owned, transport=transport) == [[]] * n


def cut_differently() -> bool:
    """The same gradients reduced in one piece and in many, in float32."""
    world = pl.init()
    transport = open_transport(world)
    numel = 10_007
    whole, pieces = (transport.allocate(numel, torch.float32) for _ in range(2))
    for buffer in (whole, pieces):
        buffer.copy_(values(world.rank, numel, torch.float32))
    transport.run("all_reduce", whole, "whole", 1 / 3)
    for piece in pieces.split(777):
        transport.run("all_reduce", piece, "piece", 1 / 3)
    equal = torch.equal(whole, pieces)
    transport.close()
    return equal


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_where_a_buffer_is_cut_does_not_change_a_bit(ranks, transport) -> None:
    assert ranks(3, cut_differently, transport=transport) == [True] * 3


def low_precision_sum() -> list[float]:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(4, torch.bfloat16)
    buffer.fill_(256.0 if world.rank == 0 else 1.0)
    transport.run("all_reduce", buffer, "test")
    result = buffer.float().tolist()
    transport.close()
    return result


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_bf16_sums_are_accumulated_in_fp32_and_rounded_once(ranks, transport) -> None:
    # 256 + 1 + 1 + 1 = 259, which bf16 rounds to 260; added in bf16 each 1 would be lost.
    assert ranks(4, low_precision_sum, transport=transport) == [[260.0] * 4] * 4


def disagree() -> str:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    try:
        transport.run("all_reduce" if world.rank else "broadcast", buffer, f"bucket {world.rank}")
    except CommunicationError as error:
        return str(error)
    finally:
        transport.close()
    return "no error"


def test_ranks_in_different_calls_are_told_so_and_nothing_hangs(ranks) -> None:
    start = time.monotonic()
    messages = ranks(2, disagree)
    assert time.monotonic() - start < 10
    assert any("ranks disagree" in m and "bucket 0" in m and "bucket 1" in m for m in messages), messages
    assert all("ranks disagree" in m or "is gone" in m for m in messages), messages


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


def test_a_silent_peer_is_named_within_the_time_limit(ranks) -> None:
    assert "rank 1 did not answer within 1 s" in ranks(2, be_silent)[0]


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
    results = ranks(3, over_the_wire, transport="gloo")
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


def silent_over_gloo() -> float:
    world = pl.init()
    transport = open_transport(replace(world, timeout=1.0))
    buffer = transport.allocate(64, torch.float32)
    start = time.monotonic()
    if world.rank == 0:
        with pytest.raises(CommunicationError, match="bucket 7"):
            transport.run("all_reduce", buffer, "bucket 7")
    elapsed = time.monotonic() - start
    pl.barrier()
    return elapsed


def test_gloo_too_gives_a_silent_peer_up_within_the_time_limit(ranks) -> None:
    assert max(ranks(2, silent_over_gloo, transport="gloo")) < 10


def die_and_leave_a_child() -> None:
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(64, torch.float32)
    pl.barrier()
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        transport.run("all_reduce", buffer, "bucket 7")
    raise AssertionError(f"noticed after {time.monotonic() - start:.3f} s")


def test_a_killed_peer_is_noticed_at_once_though_its_child_lives_on(ranks) -> None:
    with pytest.raises(RankError, match=r"noticed after 0\.\d+ s"):
        ranks(2, die_and_leave_a_child)
