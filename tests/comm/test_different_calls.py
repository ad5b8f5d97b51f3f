"""Ranks that call different collectives are all told which, before any buffer is mixed or the time limit passes."""

from __future__ import annotations

import time

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.transport import CommunicationError

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
def test_ranks_in_different_calls_are_all_told_so_before_the_time_limit(ranks, transport, n, what) -> None:
    results = ranks(n, disagree, what, transport=transport)
    assert all("ranks disagree" in message or "is gone" in message for message, _ in results), results
    assert max(seconds for _, seconds in results) < 20
    told = [message for message, _ in results if "ranks disagree" in message]
    (theirs, ours) = DIFFERENT_CALLS[what]
    names = [f"{name} {label} {numel} {str(dtype)[6:]}" for name, numel, dtype, label in (theirs, ours)]
    assert any(all(name in message for name in names) for message in told), results
    assert any(f"rank {n - 1} is in collective 1" in message for message in told), results
