from __future__ import annotations

import gc
import hashlib
import time
import weakref
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import paceline as pl
from paceline.comm.connect import open_transport
from paceline.comm.cpu.codecs import BLOCK, CODECS, Codec
from paceline.comm.cpu.sums import Kernel
from paceline.core.collectives.rounds import chunk


def sent_as(name: str, source: Tensor, times: int = 1) -> list[Tensor]:
    """What receivers see of `source`, sent several times over."""
    codec = CODECS[name]
    data = torch.empty(codec.size(source.numel()), dtype=torch.uint8)
    seen, arrived = torch.empty_like(source), torch.empty_like(source)
    encode = codec.encode_kernel(source, data, seen, codec.residual(source.numel()))
    decode = codec.decode_kernel(data, arrived)
    results = []
    for _ in range(times):
        encode()
        decode()
        assert torch.equal(seen, arrived), "the sender knows what the receivers see"
        results.append(arrived.clone())
    return results


def values(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Blocks of very different size.
    return torch.randn(numel, generator=generator) * 10.0 ** (torch.arange(numel) // BLOCK % 7 - 3).float()


@given(numel=st.integers(1, 5 * BLOCK + 3), seed=st.integers(0, 100))
def test_bf16_is_the_nearest_bf16_and_half_the_bytes(numel: int, seed: int) -> None:
    source = values(numel, seed)
    assert torch.equal(sent_as("bfloat16", source)[0], source.bfloat16().float())
    assert CODECS["bfloat16"].size(numel) == 2 * numel


@given(numel=st.integers(1, 5 * BLOCK + 3), seed=st.integers(0, 100))
def test_int8_is_off_by_half_a_step_of_its_block_at_most(numel: int, seed: int) -> None:
    source = values(numel, seed)
    (seen,) = sent_as("int8", source)
    for start in range(0, numel, BLOCK):
        block = slice(start, start + BLOCK)
        step = source[block].abs().max() / 127
        assert (seen[block] - source[block]).abs().max() <= 0.5001 * step


@given(numel=st.integers(1, 3 * BLOCK), seed=st.integers(0, 20), times=st.integers(1, 12))
def test_int8_owes_at_most_a_rounding_error_however_often_it_is_sent(numel: int, seed: int, times: int) -> None:
    source = values(numel, seed)
    total = torch.stack(sent_as("int8", source, times)).double().sum(0)
    for start in range(0, numel, BLOCK):
        block = slice(start, start + BLOCK)
        # The residual is added before the next rounding, so that a block's largest may grow by half a step.
        step = 1.01 * source[block].abs().max() / 127
        assert (total[block] - times * source[block].double()).abs().max() <= 0.51 * step


def test_int8_takes_a_quarter_of_the_bytes_and_a_scale_a_block() -> None:
    assert CODECS["int8"].size(1000 * BLOCK) == 1000 * (BLOCK + 4)
    assert 4 * 1000 * BLOCK / CODECS["int8"].size(1000 * BLOCK) > 3.9


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_arrives_as_such_and_leaves_no_trace(name: str, bad: float) -> None:
    source = values(2 * BLOCK)
    source[3] = bad
    codec = CODECS[name]
    data, arrived = torch.empty(codec.size(source.numel()), dtype=torch.uint8), torch.empty_like(source)
    encode = codec.encode_kernel(source, data, None, codec.residual(source.numel()))
    decode = codec.decode_kernel(data, arrived)
    encode()
    decode()
    assert not arrived.isfinite().all()
    source[3] = 1.0
    for _ in range(2):
        encode()
        decode()
        assert arrived.isfinite().all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_sent_as_zeros(name: str) -> None:
    assert torch.equal(sent_as(name, torch.zeros(BLOCK + 1))[0], torch.zeros(BLOCK + 1))


NUMEL = 4 * 3000


def gradients(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).clamp(-4, 4)


def summed(wire: str, collective: str, hosts_of: int) -> tuple[Tensor, int]:
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank // hosts_of}"):
        transport = open_transport(world, wire=wire)  # type: ignore[arg-type]
    buffer = transport.allocate(NUMEL, torch.float32)
    buffer.copy_(gradients(world.rank))
    before = transport.sent_bytes
    transport.run(collective, buffer, "gradients", 1 / world.world_size)
    result = buffer.clone(), transport.sent_bytes - before
    transport.close()
    return result


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize("wire", CODECS)
def test_an_all_reduce_is_the_mean_but_for_the_rounding_and_the_same_on_every_rank(ranks, wire, local) -> None:
    exact = torch.stack([gradients(rank) for rank in range(4)]).double().mean(0)
    full = ranks(4, summed, "full", "all_reduce", local)
    results = ranks(4, summed, wire, "all_reduce", local)
    # Half a step on the way to the sum, and half a step on the way back.
    step = {"bfloat16": 4 * 2**-8, "int8": 4 / 127}[wire]
    for result, _ in results:
        assert torch.equal(result, results[0][0])
        assert (result.double() - exact).abs().max() <= 1.01 * step
    assert full[0][1] / results[0][1] > {"bfloat16": 1.8, "int8": 3.0}[wire]


@pytest.mark.parametrize("wire", CODECS)
def test_a_reduce_scatter_too(ranks, wire) -> None:
    exact = torch.stack([gradients(rank) for rank in range(2)]).double().mean(0)
    for rank, (result, _) in enumerate(ranks(2, summed, wire, "reduce_scatter", 1)):
        own = slice(*chunk(rank, 2, NUMEL))
        error = (result[own].double() - exact[own]).abs()
        assert 0 < error.max() <= 4 / 127


@pytest.mark.parametrize("collective", ["all_gather", "broadcast"])
def test_what_is_not_a_sum_is_sent_as_it_is(ranks, collective) -> None:
    full, wired = (ranks(2, summed, wire, collective, 1) for wire in ("full", "int8"))
    for (expected, _), (result, _) in zip(full, wired, strict=True):
        assert torch.equal(result, expected)


class Slowed:
    """A codec that takes its time before it puts anything into bytes."""

    def __init__(self, codec: Codec) -> None:
        self.size, self.decode_kernel, self._encode_kernel = codec.size, codec.decode_kernel, codec.encode_kernel
        self.residual = codec.residual

    def encode_kernel(self, source: Tensor, data: Tensor, sent: Tensor | None, residual: Tensor | None) -> Kernel:
        encode = self._encode_kernel(source, data, sent, residual)

        def slowly() -> None:
            time.sleep(0.001)
            encode()

        return slowly


def sums_of_many_calls(wire: str, slow: int | None) -> list[str]:
    """What each of many all-reduces among a host of two ranks and one of one leaves, in short."""
    world = pl.init()
    rank = world.rank
    slowed = {wire: Slowed(CODECS[wire])} if rank == slow else {}
    with patch("paceline.comm.connect._host", lambda: f"host {rank // 2}"), patch.dict(CODECS, slowed):
        transport = open_transport(world, wire=wire)  # type: ignore[arg-type]
    buffer = transport.allocate(NUMEL, torch.float32)
    results = []
    for call in range(100):
        buffer.copy_(gradients(rank)).mul_(1 + call)
        transport.run("all_reduce", buffer, "gradients", 1 / world.world_size)
        results.append(hashlib.blake2b(buffer.numpy().tobytes(), digest_size=8).hexdigest())
    transport.close()
    return results


@pytest.mark.parametrize("slow", [None, 0, 1, 2])
@pytest.mark.parametrize("wire", CODECS)
def test_neighbours_see_what_other_hosts_see_however_long_rounding_takes(ranks, wire, slow) -> None:
    first, *others = ranks(3, sums_of_many_calls, wire, slow)
    # Sums of their own, not one left lying there.
    assert len(set(first)) == 100
    assert others == [first, first]


TIMES = 40


def sum_of_many(forgets: str) -> float:
    """The largest error of a sum over calls: gradients of 127, and of 0.3 that int8 rounds to 0 beside it."""
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank}"):
        transport = open_transport(world, wire="int8")
    gradient = torch.full((BLOCK,), 0.3)
    gradient[0] = 127.0
    buffer, other = transport.allocate(BLOCK, torch.float32), transport.allocate(64, torch.float32)
    total = torch.zeros(BLOCK)
    for _ in range(TIMES):
        buffer.copy_(gradient)
        transport.run("all_reduce", buffer, "bucket 1", 1 / world.world_size)
        total += buffer
        if forgets == "an allocation":
            transport.allocate(1, torch.float32)
        elif forgets == "many other calls":
            with patch("paceline.comm.cpu.transport._MOST_PREPARED", 4):
                for number in range(2, 8):
                    transport.run("all_reduce", other, f"bucket {number}", 1 / world.world_size)
    transport.close()
    return float((total - TIMES * gradient).abs().max())


@pytest.mark.parametrize("forgets", ["nothing", "an allocation", "many other calls"])
def test_int8_residuals_are_kept_as_long_as_their_buffer(ranks, forgets) -> None:
    # Half a step on the way to the sum, and half a step on the way back.
    assert max(ranks(2, sum_of_many, forgets)) <= 1.01


def test_int8_residuals_do_not_outlive_their_buffer(ranks) -> None:
    assert ranks(2, residual_of_a_freed_buffer) == [True, True]


def residual_of_a_freed_buffer() -> bool:
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank}"):
        transport = open_transport(world, wire="int8")
    buffer = transport.allocate(BLOCK, torch.float32)
    transport.run("all_reduce", buffer, "bucket 1", once=True)
    residuals = [weakref.ref(kept) for kept in transport._buffers.residuals(buffer).kept.values()]
    assert residuals
    del buffer
    gc.collect()
    transport.close()
    return all(kept() is None for kept in residuals)


def parts_of_a_tensor() -> float:
    """The largest error of a sum over calls, where a tensor of one's own passes through a buffer part by part."""
    world = pl.init()
    with patch("paceline.comm.connect._host", lambda: f"host {world.rank // 2}"):
        transport = open_transport(world, wire="int8")
    # The residual of the first part would be undone by the second, and none of it ever sent.
    gradient = torch.zeros(3 << 18)
    gradient[: 1 << 18], gradient[1 << 18 : 2 << 18] = 0.4, -0.4
    gradient[::BLOCK] = 127.0
    total = torch.zeros_like(gradient)
    for _ in range(6):
        mine = gradient.clone()
        transport.run("all_reduce", mine, "bucket 1", 1 / world.world_size)
        total += mine
    transport.close()
    return float((total - 6 * gradient).abs().max())


def test_int8_residuals_of_one_part_of_a_tensor_are_not_added_to_the_next(ranks) -> None:
    assert max(ranks(3, parts_of_a_tensor)) <= 1.01
