"""Collectives over shared memory and sockets against reference sums."""

from __future__ import annotations

import itertools
import random
import weakref
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.cpu.sums import CHUNK
from paceline.core.collectives.algorithms import ALGORITHMS, REDUCTIONS, ROOTED, traffic
from tests.comm.reference import FROM_ROOTS, NAMES, TOLERANCE, expected, values
from tests.quick import diagonal, full

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CASES = list(itertools.product(DTYPES, (0, 1, 7, 1000, CHUNK + 5)))
LARGE = [(dtype, (3 << 20) // dtype.itemsize + 1) for dtype in (torch.float32, torch.bfloat16)]


def run_all(owned: bool, cases: list[tuple[torch.dtype, int]]) -> list[str]:
    """Every algorithm in every case: right, the same bits the second time, and its plan's bytes.

    Rooted ones by turns from all ranks.
    """
    world = pl.init()
    transport = open_transport(world)
    rank, n = world.rank, world.world_size
    problems = []
    most = max(size for _, size in cases)
    rooms = {dtype: transport.allocate(most, dtype) for dtype, _ in cases}
    data = [values(peer, most, torch.float64) for peer in range(n)]
    for case, ((dtype, size), (collective, known)) in enumerate(itertools.product(cases, ALGORITHMS.items())):
        numel = size - size % n if collective == "all_to_all" else size
        inputs = [each[:numel].to(dtype) for each in data]
        buffer = rooms[dtype][:numel] if owned else torch.empty(numel, dtype=dtype)
        scale = 1 / n if "reduce" in collective else 1.0
        root = case // len(ALGORITHMS) % n if collective in ROOTED else 0
        exact, where = expected(collective, rank, inputs, scale, root)
        exact = exact[where]
        bound = TOLERANCE[dtype] * (1 + exact.abs())
        for name in (f"{collective}/{algorithm}" + f"@{root}" * bool(root) for algorithm in known):
            results = []
            for _ in range(2 if size == 1000 else 1):
                buffer.copy_(inputs[rank])
                moved = transport.run(name, buffer, "test", scale)
                results.append(buffer[where].clone())
            if not ((results[0] - exact).abs_() <= bound).all():
                problems.append(f"{name} {dtype} {numel}: wrong values")
            if not torch.equal(results[0], results[-1]):
                problems.append(f"{name} {dtype} {numel}: other bits the second time")
            plan = traffic(name, rank, n, numel)
            if owned and moved != (plan.sent * dtype.itemsize, plan.received * dtype.itemsize):
                problems.append(f"{name} {dtype} {numel}: moved {moved}, plan {plan}")
    transport.close()
    return problems


TRANSPORTS = ("auto", "tcp")
OWN = {("tcp", "1"), ("auto", "2"), ("tcp", "3")}


@pytest.mark.parametrize(
    ("transport", "n"),
    [
        *diagonal(TRANSPORTS, (1, 2, 3, 4, 5, 8), quick={("auto", "3"), ("tcp", "4")}),
        full("auto", 6),
        full("tcp", 7),
    ],
)
def test_every_algorithm_equals_the_reference_and_moves_its_plans_bytes(ranks, transport, n) -> None:
    assert ranks(n, run_all, True, CASES, transport=transport) == [[]] * n


@pytest.mark.parametrize(("transport", "n"), diagonal(TRANSPORTS[::-1], (1, 2, 3, 4), quick=OWN))
def test_and_so_it_does_with_tensors_of_ones_own(ranks, transport, n) -> None:
    assert ranks(n, run_all, False, CASES, transport=transport) == [[]] * n


@pytest.mark.full
@pytest.mark.parametrize(
    ("transport", "n", "owned"),
    [
        *diagonal(TRANSPORTS, (2, 3), (True,), quick={("tcp", "2", "True")}),
        full("auto", 3, False),
        full("tcp", 3, False),
        full("tcp", 5, True),
    ],
)
def test_and_so_it_does_with_megabytes(ranks, transport, n, owned) -> None:
    assert ranks(n, run_all, owned, LARGE, transport=transport) == [[]] * n


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


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def over_the_wire() -> tuple[int, int]:
    """Bytes that the loopback interface carried for one large all-reduce, and those that were counted."""
    world = pl.init()
    transport = open_transport(world)
    buffer = transport.allocate(4 << 20, torch.float32)
    transport.run("all_reduce", buffer, "warm")
    carried = []
    for _ in range(5):
        pl.barrier()
        start = loopback_bytes()
        pl.barrier()
        moved = transport.run("all_reduce", buffer, "test")
        pl.barrier()
        carried.append(loopback_bytes() - start)
    transport.close()
    # Others' traffic comes on top, at times.
    return min(carried), moved.sent


def test_counted_bytes_are_what_the_wire_carries(ranks) -> None:
    results = ranks(3, over_the_wire, transport="tcp")
    counted = sum(sent for _, sent in results)
    assert results[0][0] == pytest.approx(counted, rel=0.05)


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


def gather_into_what_goes_away(once: bool) -> tuple[bool, int]:
    """Whether the memory of a temporary outlives the all-gather into it, and how many calls are kept."""
    world = pl.init()
    transport = open_transport(world)
    shard = transport.allocate(4, torch.float32)
    shard.fill_(world.rank)
    whole = torch.empty(4 * world.world_size)
    memory = weakref.ref(whole.untyped_storage())
    before = len(transport._prepared)
    transport.run("all_gather", whole, "test", shard=shard, once=once)
    assert whole.tolist() == [float(peer) for peer in range(world.world_size) for _ in range(4)]
    del whole
    result = memory() is not None, len(transport._prepared) - before
    transport.close()
    return result


def test_a_call_made_once_keeps_nothing_of_its_buffer(ranks) -> None:
    assert ranks(2, gather_into_what_goes_away, True) == [(False, 0)] * 2
    # What is made ready for the next time holds its buffer, or the above would show nothing.
    assert ranks(2, gather_into_what_goes_away, False) == [(True, 1)] * 2


def send_once() -> list[int]:
    """Bytes of memory that ranks share after each of three calls, the second of which is the last of its kind."""
    world = pl.init()
    transport = open_transport(world)
    own, shared = torch.full((1000,), float(world.rank)), []
    for once in (False, True, False):
        transport.run("broadcast", own, "test", once=once)
        assert not own.any()
        shared.append(sum(region.stop - region.start for region in transport._buffers._regions.values()))
    transport.close()
    return shared


def test_what_tensors_of_ones_own_pass_through_is_freed_after_a_call_made_once(ranks) -> None:
    for shared in ranks(2, send_once):
        assert shared[0] == shared[2] > shared[1] == 0


def drawn_calls(seed: int) -> list[str]:
    """Calls drawn alike by all ranks, on ranges of one buffer seen as any dtype; the wrong ones."""
    world = pl.init()
    transport = open_transport(world)
    rank, n = world.rank, world.world_size
    room = transport.allocate(8 * 8000, torch.uint8)
    draw = random.Random(seed)
    problems = []
    for _ in range(60):
        name, dtype = draw.choice(NAMES), draw.choice(DTYPES)
        collective = name.partition("/")[0]
        root = draw.randrange(n) if name in FROM_ROOTS else 0
        size, offset, scale = draw.choice((draw.randint(0, 20), draw.randint(0, 5000))), draw.randint(0, 2999), 1.0
        if collective in REDUCTIONS:
            scale = draw.choice((1.0, 1 / n, 0.3))
        if collective == "all_to_all":
            size -= size % n
        name += f"@{root}" * bool(root)
        inputs = [values(peer, size, dtype) for peer in range(n)]
        exact, where = expected(collective, rank, inputs, scale, root)
        exact = exact[where]
        buffer = room.view(dtype)[offset : offset + size]
        buffer.copy_(inputs[rank])
        transport.run(name, buffer, "test", scale)
        if not ((buffer[where] - exact).abs() <= TOLERANCE[dtype] * (1 + exact.abs())).all():
            problems.append(f"{name} times {scale} of {size} {dtype} from {offset}: wrong values")
    transport.close()
    return problems


@pytest.mark.parametrize(("transport", "seed"), diagonal(TRANSPORTS, (1, 2)))
def test_any_calls_one_after_another_on_any_part_of_a_buffer_equal_the_reference(ranks, transport, seed) -> None:
    assert ranks(5, drawn_calls, seed, transport=transport) == [[]] * 5
