"""Every call of NCCL's, among one rank, in every dtype, with warnings that are errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.comm.nccl import NcclTransport
from tests.gpu.devices import on_a_gpu

pytestmark = [*on_a_gpu, pytest.mark.filterwarnings("error")]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def nccl(gpu: torch.device, tmp_path: Path) -> Iterator[NcclTransport]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=gpu)
    yield NcclTransport(dist.group.WORLD, gpu)  # type: ignore[arg-type]
    # The fixture before this one ends it.


CALLS: dict[str, tuple[str, float]] = {
    "all_reduce": ("all_reduce", 1.0),
    "all_reduce, scaled": ("all_reduce", 0.5),
    "reduce_scatter": ("reduce_scatter", 1.0),
    "reduce_scatter, scaled": ("reduce_scatter", 0.5),
    "reduce": ("reduce", 1.0),
    "reduce, scaled": ("reduce", 0.5),
    "all_gather": ("all_gather", 1.0),
    "broadcast": ("broadcast", 1.0),
    "broadcast by tree": ("broadcast/tree", 1.0),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CALLS)
def test_among_one_rank_a_call_gives_the_buffer_times_its_scale(
    nccl: NcclTransport, name: str, dtype: torch.dtype
) -> None:
    collective, scale = CALLS[name]
    buffer = nccl.allocate(8, dtype)
    buffer.copy_(torch.arange(8.0))
    nccl.run(collective, buffer, "test", scale)
    assert buffer.tolist() == [scale * index for index in range(8)]


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_shard_of_another_dtype_gets_the_sum(nccl: NcclTransport, dtype: torch.dtype, stored: torch.dtype) -> None:
    buffer, shard = nccl.allocate(8, dtype), nccl.allocate(8, stored)
    buffer.copy_(torch.arange(8.0))
    nccl.run("reduce_scatter", buffer, "test", 0.5, shard)
    assert shard.tolist() == [0.5 * index for index in range(8)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8])
def test_a_shard_is_gathered_and_bytes_are_broadcast(nccl: NcclTransport, dtype: torch.dtype) -> None:
    shard, buffer = nccl.allocate(8, dtype), nccl.allocate(8, dtype)
    shard.copy_(torch.arange(8.0))
    nccl.run("all_gather", buffer, "test", shard=shard)
    nccl.run("broadcast/tree", buffer, "test")
    assert buffer.tolist() == list(range(8))


def test_sums_in_half_precision_do_not_overflow_before_they_are_scaled(nccl: NcclTransport) -> None:
    buffer = nccl.allocate(8, torch.float16)
    buffer.fill_(60_000)
    nccl.run("all_reduce", buffer, "test", 0.25)
    assert buffer.tolist() == [15_000.0] * 8
