"""What the transport of GPUs asks its process group for, seen through Gloo, which has no averages."""

from __future__ import annotations

import inspect
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import paceline as pl
from paceline.comm import nccl
from paceline.comm.nccl import NcclTransport, is_of_nccl, last_words
from paceline.core.errors import UserError

SCALES = (1.0, 0.25)


class OverGloo(NcclTransport):
    """Gloo knows neither averages nor sums of scaled parts."""

    def _operation(self, scale: float, buffer: torch.Tensor) -> Any:
        buffer.mul_(scale)
        return dist.ReduceOp.SUM


def open_on_the_cpu() -> tuple[NcclTransport, int]:
    world = pl.init()
    return OverGloo(dist.new_group(backend="gloo"), world.device), world.rank


def end(transport: NcclTransport) -> None:
    """Where nothing was sent: the other rank may not have joined yet, and would find nobody."""
    dist.barrier(transport._group)
    transport.close()


def of(rank: int) -> torch.Tensor:
    return torch.arange(6.0) + 10 * rank


TOTAL = (of(0) + of(1)).tolist()


def call_all() -> list[str]:
    """Every call that the engine makes of a transport on GPUs; those that left something else than they should."""
    transport, rank = open_on_the_cpu()
    wrong = []

    def see(what: str, found: torch.Tensor, right: list[float]) -> None:
        if found.tolist() != right:
            wrong.append(f"{what}: {found.tolist()}, not {right}")

    def own(whole: list[float]) -> list[float]:
        return whole[3 * rank : 3 * rank + 3]

    for name in ("broadcast", "broadcast/tree"):
        buffer = of(rank)
        transport.run(name, buffer, "test")
        see(name, buffer, of(0).tolist())
        # A model's tensors travel as their bytes.
        buffer = of(rank)[:5].view(torch.uint8)
        transport.run(name, buffer, "test")
        see(f"{name} of bytes", buffer.view(torch.float32), of(0)[:5].tolist())
    for once in (False, True):
        whole = torch.zeros(6)
        transport.run("all_gather", whole, "test", shard=of(rank)[:3], once=once)
        see("all_gather beside", whole, [*of(0)[:3].tolist(), *of(1)[:3].tolist()])
    whole = of(rank)
    transport.run("all_gather", whole, "test")
    see("all_gather", whole, [*of(0)[:3].tolist(), *of(1)[3:].tolist()])
    for scale in SCALES:
        total = [scale * x for x in TOTAL]
        buffer = of(rank)
        transport.run("all_reduce", buffer, "test", scale)
        see(f"all_reduce times {scale}", buffer, total)
        buffer = of(rank)
        transport.run("reduce", buffer, "test", scale)
        if rank == 0:
            see(f"reduce times {scale}", buffer, total)
        buffer = of(rank)
        transport.run("reduce_scatter", buffer, "test", scale)
        see(f"reduce_scatter times {scale}", buffer[3 * rank : 3 * rank + 3], own(total))
        for dtype in (torch.float32, torch.float64):
            shard = torch.zeros(3, dtype=dtype)
            transport.run("reduce_scatter", of(rank), "test", scale, shard)
            see(f"reduce_scatter times {scale} beside, in {dtype}", shard, own(total))
    transport.close()
    return wrong


def test_every_call_of_the_engine_does_what_its_name_says(ranks) -> None:
    assert ranks(2, call_all) == [[], []]


def call_all_without_warnings() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call_all()


def test_no_call_is_deprecated(ranks) -> None:
    assert ranks(2, call_all_without_warnings) == [[], []]


def refused() -> tuple[str, str]:
    transport, _ = open_on_the_cpu()
    with pytest.raises(ValueError) as unknown:
        transport.run("all_to_all/direct", torch.zeros(2), "bucket 1")
    with pytest.raises(UserError) as shared:
        transport.allocate_shared(2, torch.float32)
    end(transport)
    return str(unknown.value), str(shared.value)


def test_what_it_cannot_do_is_refused(ranks) -> None:
    for unknown, shared in ranks(2, refused):
        assert unknown == "all_to_all of bucket 1: not a collective that NCCL is asked for"
        assert "leave share_parameters out" in shared


def moved_bytes() -> list[tuple[int, int]]:
    transport, _ = open_on_the_cpu()
    buffer = transport.allocate(6, torch.float64)
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast/tree", "reduce")
    moved = [tuple(transport.run(name, buffer, "test")) for name in names]
    transport.close()
    return moved  # type: ignore[return-value]


def test_it_counts_the_bytes_of_a_ring(ranks) -> None:
    first, second = ranks(2, moved_bytes)
    assert first == [(48, 48), (24, 24), (24, 24), (48, 0), (0, 48)]
    assert second == [(48, 48), (24, 24), (24, 24), (0, 48), (48, 0)]


# ---- what only NCCL understands


def operations(dtype: torch.dtype) -> list[tuple[str, float]]:
    """How sums of ones times a scale are asked for, and what a part is by then."""
    transport = NcclTransport(dist.new_group(backend="gloo"), pl.init().device)
    found = []
    with patch.object(dist, "_make_nccl_premul_sum", lambda factor: f"each part times {factor}", create=True):
        for scale in (1.0, 0.5, 0.125):
            part = torch.ones(1, dtype=dtype)
            found.append((str(transport._operation(scale, part)), part.item()))
    end(transport)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parts_are_scaled_before_they_are_summed(ranks, dtype: torch.dtype) -> None:
    for found in ranks(2, operations, dtype):
        (plain, one), (mean, two), (scaled, three) = found
        # In fp16 the sum of what has yet to be scaled may be beyond its range.
        assert "SUM" in plain and "AVG" in mean and one == two == 1.0
        if dtype == torch.bfloat16:
            # Torch would give NCCL a factor of 0.
            assert "SUM" in scaled and three == 0.125
        else:
            assert scaled == "each part times 0.125" and three == 1.0


def test_torch_has_what_nccl_is_asked_for() -> None:
    assert callable(dist._make_nccl_premul_sum)  # type: ignore[attr-defined]
    calls = (
        (nccl._all_gather, ("output", "input"), {"group": None}),
        (nccl._reduce_scatter, ("output", "input", dist.ReduceOp.SUM), {"group": None}),
        (dist.all_reduce, ("tensor", dist.ReduceOp.SUM), {"group": None}),
        (dist.reduce, ("tensor",), {"op": dist.ReduceOp.SUM, "group_dst": 0, "group": None}),
        (dist.broadcast, ("tensor",), {"group_src": 0, "group": None}),
        (torch.cuda.Stream, (0,), {"priority": -1}),
        (torch.cuda.Event, (), {"enable_timing": True}),
        (torch.cuda.current_stream, (0,), {}),
        (torch.cuda.default_stream, (0,), {}),
        (torch.cuda.get_device_properties, (0,), {}),
        (torch.accelerator.current_accelerator, (), {"check_available": True}),
    )
    for function, args, named in calls:
        made = function.__new__ if inspect.isclass(function) else function
        inspect.signature(made).bind(*((function,) if inspect.isclass(function) else ()), *args, **named)
    for method in ("wait_stream", "wait_event", "synchronize", "query"):
        assert callable(getattr(torch.cuda.Stream, method))


DUPLICATE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000
Exception raised from create at /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94 (most recent call first):
frame #0: c10::Error::Error"""


def test_what_nccl_said_last_is_told() -> None:
    error = dist.DistBackendError(DUPLICATE)
    assert is_of_nccl(error)
    assert last_words(error) == "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000"
    assert last_words(dist.DistBackendError("NCCL error in: here\nunhandled system error")) == (
        "NCCL error in: here unhandled system error"
    )
    assert not is_of_nccl(dist.DistNetworkError("The server socket has failed to listen"))
