"""Collectives among ranks of several hosts: shared memory inside, sockets between, and as few bytes there as can be."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.cpu.sums import CHUNK
from paceline.core.collectives.algorithms import HIERARCHICAL
from tests.comm.reference import TOLERANCE, expected, values
from tests.quick import diagonal, full


def between_hosts(collective: str) -> tuple[str, bool, int, str]:
    """Ranks that take themselves for two hosts: shared memory inside, sockets between."""
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank // 2}"):
        transport = open_transport(world)
    n, rank = world.world_size, world.rank
    right = True
    for dtype, numel in itertools.product((torch.float64, torch.float32), (8, 1000, 4 * CHUNK)):
        inputs = [values(peer, numel, dtype) for peer in range(n)]
        for owned in (True, False):
            buffer = transport.allocate(numel, dtype) if owned else torch.empty(numel, dtype=dtype)
            buffer.copy_(inputs[rank])
            transport.run(collective, buffer, "test")
            root = int(collective.partition("@")[2] or 0)
            exact, where = expected(collective.partition("/")[0], rank, inputs, 1.0, root)
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


@pytest.mark.full
@pytest.mark.parametrize("n", [full(3), 4, full(6)])
def test_ranks_of_several_hosts_share_memory_inside_and_send_between(ranks, n) -> None:
    for collective in (
        "all_reduce",
        "all_reduce/direct",
        "reduce_scatter",
        "all_gather",
        "broadcast/tree",
        "gather/tree@2",
    ):
        for name, right, _, _ in ranks(n, between_hosts, collective):
            alone = "shared memory and tcp" if n != 3 else name
            assert right and name == alone, collective


def test_hierarchical_sends_least_between_hosts(ranks) -> None:
    header = 32 + 448
    sent = {name: ranks(4, between_hosts, f"all_reduce/{name}")[0][2] for name in ("hierarchical", "direct")}
    # 16 elements of 4 bytes: a quarter to the rank of this number on the other host, twice; or to each of its two.
    assert sent == {"hierarchical": 2 * (16 + header), "direct": 4 * (16 + header)}


def hierarchically(collective: str) -> list[str]:
    """A collective among hosts of two ranks, by name: right wherever it is cut, and the same bits the second time."""
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank // 2}"):
        transport = open_transport(world)
    n, rank = world.world_size, world.rank
    problems = []
    for dtype, numel in itertools.product((torch.float32, torch.bfloat16), (1, 7, 1001, CHUNK + 5)):
        inputs = [values(peer, numel, dtype) for peer in range(n)]
        scale = 1 / n if "reduce" in collective else 1.0
        exact, where = expected(collective, rank, inputs, scale)
        exact = exact[where]
        buffer = transport.allocate(numel, dtype)
        results = []
        for _ in range(2):
            buffer.copy_(inputs[rank])
            transport.run(f"{collective}/hierarchical", buffer, "test", scale)
            results.append(buffer[where].clone())
        if not ((results[0] - exact).abs() <= TOLERANCE[dtype] * (1 + exact.abs())).all():
            problems.append(f"{dtype} {numel}: wrong values")
        if not torch.equal(*results):
            problems.append(f"{dtype} {numel}: other bits the second time")
    transport.close()
    return problems


@pytest.mark.parametrize(("collective", "n"), diagonal(HIERARCHICAL, (4, 6)))
def test_hierarchical_equals_the_reference_among_hosts_of_two_ranks(ranks, collective, n) -> None:
    assert ranks(n, hierarchically, collective) == [[]] * n
