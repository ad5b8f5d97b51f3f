"""Norms of chunks: those of the sums that a collective really makes on its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import chunk
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.report.chunk_norms import ChunkNorms, Products, chunk_norms, read_products
from paceline.report.chunk_sums import named
from paceline.report.lines import Damage
from paceline.report.moments import moments
from tests.report.test_moments import SMALL, program

RANKS = 4


def made(schedule: Schedule, parts: int = 1) -> tuple[dict[str, torch.Tensor], ChunkNorms]:
    """Gradients of all ranks by bucket, and what products of them tell."""
    generator = torch.Generator().manual_seed(0)
    chunks = schedule.shards if schedule.shards > 1 else RANKS
    values, lines = {}, []
    for bucket in schedule.reduced_buckets:
        rows = torch.randn(RANKS, bucket.numel, generator=generator, dtype=torch.float64)
        pieces = [rows[:, slice(*chunk(index, chunks, bucket.numel))] for index in range(chunks)]
        products = [[float(p[a] @ p[b]) for a in range(RANKS) for b in range(a, RANKS)] for p in pieces]
        values[bucket.name] = rows
        lines.append(Products(3, bucket.name, parts, products))
    found = chunk_norms(lines, schedule)
    assert found is not None
    return values, found


@pytest.mark.parametrize("way", ["ring", "tree"])
@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_every_round_has_the_norms_of_what_is_there_then(way: str, gradients: str) -> None:
    known = program(Strategy(bucket_mb=SMALL, gradients=gradients), RANKS)  # type: ignore[arg-type]
    values, norms = made(known.schedule)
    found = moments(known, way, None, norms)
    assert found is not None
    for number, bucket in enumerate(known.schedule.reduced_buckets):
        # The collective itself, on the values, round by round.
        algorithm = find_algorithm(f"all_reduce/{way}")
        per_rank = [algorithm(rank, RANKS, RANKS) for rank in range(RANKS)]
        now = values[bucket.name].clone()
        whose = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
        told = [m for m in found if any(s.bucket == number and s.ranks for s in m.sums)]
        assert len(told) == 1 + sum(any(r.receives for r in rounds) for rounds in zip(*per_rank, strict=True))
        assert {(s.rank, s.chunk, s.ranks) for s in told[0].sums if s.bucket == number} == {
            (rank, c, str(rank)) for rank in range(RANKS) for c in range(RANKS)
        }
        moment = iter(told[1:])
        for rounds in zip(*per_rank, strict=True):
            before, had, changed = now.clone(), [[set(s) for s in row] for row in whose], set()
            for rank, round_ in enumerate(rounds):
                for sent in round_.receives:
                    for c in range(sent.start, sent.stop):
                        part = slice(*chunk(c, RANKS, bucket.numel))
                        adds = round_.combine == "add"
                        now[rank, part] = before[sent.peer, part] + (before[rank, part] if adds else 0)
                        whose[rank][c] = had[sent.peer][c] | (had[rank][c] if adds else set())
                        changed.add((rank, c))
            if not changed:
                continue
            sums = {(s.rank, s.chunk): s for s in next(moment).sums if s.bucket == number}
            assert set(sums) == {(r, c) for r, c in changed if whose[r][c] != had[r][c]}
            for (rank, c), each in sums.items():
                whole = len(whose[rank][c]) == RANKS and gradients == "mean"
                norm = now[rank, slice(*chunk(c, RANKS, bucket.numel))].norm().item() / (RANKS if whole else 1)
                assert each.norm == pytest.approx(norm, rel=1e-3)
                assert each.ranks == named(frozenset(whose[rank][c]))


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [
        (Strategy(zero=1, bucket_mb=SMALL), 1),
        (Strategy(zero=2, bucket_mb=SMALL), 2),
        (Strategy(zero=3), 1),
        (Strategy(zero=3, shard=2), 1),
        (SYSTEMS["parameter server"], 1),
    ],
)
def test_sums_end_with_those_of_all_ranks(strategy: Strategy, micro_batches: int) -> None:
    known = program(strategy, RANKS, micro_batches)
    values, norms = made(known.schedule, micro_batches)
    found = moments(known, "ring", None, norms)
    assert found is not None
    everyone = [s for moment in found for s in moment.sums if s.ranks == "0 to 3"]
    chunks = known.schedule.shards if known.schedule.shards > 1 else RANKS
    for each in everyone:
        bucket = known.schedule.reduced_buckets[each.bucket]
        c = each.rank % known.schedule.shards if each.chunk == chunks else each.chunk
        mean = values[bucket.name].mean(0)[slice(*chunk(c, chunks, bucket.numel))]
        # Sums of several micro-batches are no norms of the last one's.
        assert each.norm == (pytest.approx(mean.norm().item(), rel=1e-3) if micro_batches == 1 else None)
    if micro_batches > 1:
        partial = [s for moment in found for s in moment.sums if s.ranks and s.norm is not None]
        assert {each.bucket for each in partial} == {0, 1, 2, 3}
    assert {each.bucket for each in everyone} == set(range(len(known.schedule.reduced_buckets)))
    # Before the update nothing is forgotten, and after it nothing is held.
    last: dict[tuple[int, int, int], str] = {}
    for moment in found:
        last |= {(s.bucket, s.rank, s.chunk): s.ranks for s in moment.sums}
    assert set(last.values()) == {""}


def test_what_cancels_out_is_nothing_and_what_is_not_finite_is_not_known() -> None:
    norms = ChunkNorms((Products(1, "b", 1, [[4.0, -4.0, 4.0], [None, 1.0, 1.0]]),), 2, False)
    assert [norms.norm("b", 0, ranks) for ranks in ([0], [1], [0, 1])] == [2.0, 2.0, 0.0]
    assert [norms.norm("b", 1, ranks) for ranks in ([0], [1], [0, 1])] == [None, 1.0, None]
    assert named(frozenset((0, 1, 3, 5, 6, 7))) == "0, 1, 3, 5 to 7" and named(frozenset()) == ""


def test_the_latest_step_is_read_and_what_fits_no_schedule_is_left_out(tmp_path: Path) -> None:
    schedule = program(Strategy(bucket_mb=SMALL), RANKS).schedule
    _, norms = made(schedule)
    lines = [{"step": line.step, "bucket": line.bucket, "parts": 1, "products": line.products} for line in norms.lines]
    old, none = {**lines[0], "step": 1}, {**lines[0], "products": []}
    path = tmp_path / "chunk_products.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [old, *lines, *lines, none]) + '{"step"')
    found = read_products(path, damage := Damage())
    assert found == norms.lines and damage == Damage(1, is_cut=True)
    assert chunk_norms(found, schedule) is not None
    assert chunk_norms(found[1:], schedule) is None and chunk_norms((), schedule) is None
    assert chunk_norms(found, program(Strategy(bucket_mb=SMALL), 2).schedule) is None
