"""What the transport of GPUs asks its process group for, seen through Gloo, which has no averages."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import paceline as pl
from paceline.comm.nccl import NcclTransport
from paceline.core.errors import UserError

SCALES = (1.0, 0.25)
"""With two ranks neither is a mean, which NCCL is asked for by a name that Gloo does not know."""


def open_on_the_cpu() -> tuple[NcclTransport, int]:
    world = pl.init()
    return NcclTransport(dist.new_group(backend="gloo"), world.device), world.rank


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
    transport.close()
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
