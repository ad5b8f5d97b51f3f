"""N ranks equal one process: every way to synchronise, with and without accumulation, in float64."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.core.ops import COMPUTE, GRADIENT_NORM, STREAMS
from paceline.core.strategy import SYSTEMS, Strategy
from tests.quick import diagonal, some

STEPS = 3
SAMPLES = 36


class Net(nn.Module):
    """Small, with what layouts stumble over: odd sizes, a tied head, a scalar, a direct parameter, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 19, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.full((6,), 0.1), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 19, (SAMPLES, 5), generator=generator) for _ in range(2))  # type: ignore[return-value]


def train(
    strategy: Strategy, accumulation: int, rank: int, n: int, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Steps of AdamW with clipping on this rank's part of the batch; the mean over ranks of mean losses."""
    torch.manual_seed(7 if rank == 0 else 1000 + rank)  # other ranks start elsewhere: the broadcast must mend it
    model = pl.parallelize(Net().to(dtype), strategy)
    engine = pl.engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = (part[rank::n].chunk(accumulation) for part in batch(step))
        for x, y in pl.accumulate(model, list(zip(inputs, targets, strict=True))):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / accumulation
            engine.count(loss)
            loss.backward()
        losses.append(engine.counts().item() / n)
        norms.append(pl.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with pl.full_parameters(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    events = engine.drain_events()  # after what full_parameters waited for
    executed = [[event for event in events if event.step == step] for step in range(STEPS)]
    planned = engine.schedule.step(accumulation)
    transport = engine.program.collectives.transports["reduce"].name if n > 1 else "none"
    pl.release(model)
    return {
        "state": state,
        "losses": losses,
        "norms": norms,
        "events": executed,
        "planned": planned,
        "transport": transport,
    }


def rank_main(strategy: Strategy, accumulation: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    world = pl.init()
    return train(strategy, accumulation, world.rank, world.world_size, dtype)


def reference() -> dict[str, Any]:
    """The same training in plain PyTorch, one process, the whole batch at once."""
    torch.manual_seed(7)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"state": model.state_dict(), "losses": losses, "norms": norms}


def assert_close(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], abs=1e-12, rel=0)
    assert result["norms"] == pytest.approx(expected["norms"], abs=1e-12, rel=0)
    assert result["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        torch.testing.assert_close(result["state"][name], value, atol=1e-12, rtol=0, msg=name)


STRATEGIES = {
    **SYSTEMS,
    "tiny buckets, overlapped": Strategy(bucket_mb=0.0005),
    "zero 1": Strategy(zero=1, bucket_mb=0.0005),
    "zero 2": Strategy(zero=2, bucket_mb=0.0005),
    "zero 1, shared parameters": Strategy(zero=1, bucket_mb=0.0005, share_parameters=True),
    "zero 2, shared parameters": Strategy(zero=2, bucket_mb=0.0005, share_parameters=True),
    "zero 3, shared parameters": Strategy(zero=3, bucket_mb=0.0005, share_parameters=True),
    "zero 3": Strategy(zero=3),
    "zero 3, deferred": Strategy(zero=3, accumulation="defer"),
    "zero 3, held": Strategy(zero=3, accumulation="hold"),
    "zero 3, nothing ahead": Strategy(zero=3, prefetch=0),
    "zero 3, 2 ahead": Strategy(zero=3, prefetch=2),
}

HYBRID = {f"zero {stage}, 2 x 2": Strategy(zero=stage, shard=2, bucket_mb=0.0005) for stage in (1, 2, 3)}  # type: ignore[arg-type]
HYBRID["zero 1, 2 x 2, shared parameters"] = Strategy(zero=1, shard=2, bucket_mb=0.0005, share_parameters=True)


QUICK = {"buckets, overlapped", "zero 1", "zero 2", "zero 3", "zero 3, 2 x 2"}
"""One of each stage, and of what groups do."""

BETWEEN = {"zero 2", "zero 3, 2 x 2"}
"""Of these, what another link than memory changes: gradients reduced into shards, weights gathered, and groups."""

SEVERAL = {f"N={n}, {k} micro-batches": (n, k) for n, k in ((3, 1), (4, 3), (2, 3), (2, 1))}
ALONE = [pytest.param((1, 3), *case.values, marks=case.marks, id=f"N=1, {case.id}") for case in some(STRATEGIES, QUICK)]


@pytest.mark.parametrize(("world", "system"), [*ALONE, *diagonal(SEVERAL, STRATEGIES.keys())])
def test_n_ranks_equal_one_process_and_run_their_schedule(ranks, world: tuple[int, int], system: str) -> None:
    expected = reference()
    n, accumulation = world
    for rank, result in enumerate(ranks(n, rank_main, STRATEGIES[system], accumulation)):
        assert_close(result, expected)
        assert result["transport"] == ("none" if n == 1 else "shared memory")
        assert_executed_as_planned(result, rank)


@pytest.mark.parametrize(("accumulation", "system"), diagonal((1, 3), HYBRID.keys()))
def test_groups_that_shard_and_replicate_equal_one_process_too(ranks, system: str, accumulation: int) -> None:
    expected = reference()
    for rank, result in enumerate(ranks(4, rank_main, HYBRID[system], accumulation)):
        assert_close(result, expected)
        assert_executed_as_planned(result, rank)


def as_two_hosts(strategy: Strategy, accumulation: int) -> dict[str, Any]:
    rank = pl.init().rank
    with patch("paceline.comm.connect._host", lambda: f"host {rank // 2}"):
        return rank_main(strategy, accumulation)


@pytest.mark.parametrize("system", some(["buckets, overlapped", "zero 1", "zero 2", "zero 3", *HYBRID], BETWEEN))
def test_ranks_of_two_hosts_equal_one_process_too(ranks, system: str) -> None:
    expected = reference()
    for rank, result in enumerate(ranks(4, as_two_hosts, {**STRATEGIES, **HYBRID}[system], 3)):
        assert_close(result, expected)
        # Groups of two are within a host.
        assert result["transport"] == ("shared memory" if system in HYBRID else "shared memory and tcp")
        assert_executed_as_planned(result, rank)


SEPARATE = {name: s for name, s in {**STRATEGIES, **HYBRID}.items() if not s.share_parameters}


@pytest.mark.parametrize("system", some(SEPARATE, BETWEEN))
def test_over_sockets_n_ranks_equal_one_process_too(ranks, system: str) -> None:
    expected = reference()
    n = 4 if system in HYBRID else 3
    for rank, result in enumerate(ranks(n, rank_main, SEPARATE[system], 3, transport="tcp")):
        assert_close(result, expected)
        assert result["transport"] == "tcp"
        assert_executed_as_planned(result, rank)


def assert_executed_as_planned(result: dict[str, Any], rank: int) -> None:
    """Ops, their order on each stream, and bytes counted where they moved equal the schedule's, in every step."""
    for step, events in enumerate(result["events"]):
        for stream in STREAMS:
            planned = [op for op in result["planned"] if op.stream == stream]
            executed = [event for event in events if event.stream == stream and event.planned]
            assert [(e.kind, e.target, e.micro_batch, e.phase) for e in executed] == [tuple(o.key) for o in planned]
            assert [(e.bytes, e.sent, e.received) for e in executed] == [(o.bytes, o.sent, o.received) for o in planned]
            assert [event.after for event in executed] == [op.after for op in planned]
            assert all(event.step == step and event.rank == rank for event in executed)
            assert all(event.end >= event.start for event in executed)
            for earlier, later in itertools.pairwise(executed):
                assert later.start >= earlier.end - 1e-9, "ops of one stream overlap"
        # Besides, what the loop has asked for and what the first backward of all does.
        first = {"start of the first backward"} if step == 0 else set()
        assert {event.target for event in events if not event.planned} <= first | {GRADIENT_NORM}
    assert any(op.kind in COMPUTE for op in result["planned"])


OTHERWISE: dict[str, Strategy] = {
    **{f"zero {zero}, bfloat16": Strategy(zero=zero, precision="bfloat16", bucket_mb=0.0005) for zero in (0, 1, 2, 3)},  # type: ignore[arg-type]
    **{
        f"zero {zero}, bfloat16, reduced in it": Strategy(
            zero=zero,  # type: ignore[arg-type]
            precision="bfloat16",
            reduce_in_float32=False,
            bucket_mb=0.0005,
        )
        for zero in (0, 3)
    },
    **{f"zero {zero}, recomputing": Strategy(zero=zero, recompute="unit", bucket_mb=0.0005) for zero in (0, 2, 3)},  # type: ignore[arg-type]
    "zero 1, int8": Strategy(zero=1, wire="int8", bucket_mb=0.0005),
}


@pytest.mark.parametrize(("accumulation", "system"), diagonal((3, 1), OTHERWISE.keys()))
def test_in_low_precision_recomputing_or_encoded_they_run_their_schedule_too(
    ranks, system: str, accumulation: int
) -> None:
    strategy = OTHERWISE[system]
    transport = "tcp" if strategy.wire != "full" else "auto"
    for rank, result in enumerate(ranks(2, rank_main, strategy, accumulation, torch.float32, transport=transport)):
        assert_executed_as_planned(result, rank)
