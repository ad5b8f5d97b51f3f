"""Products of ranks' gradients: norms of partial sums that follow from them are those of the sums themselves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import paceline as pl
from paceline.core.collectives.rounds import chunk
from paceline.core.strategy import Strategy
from paceline.executor import chunk_products as module
from paceline.executor.chunk_products import is_small_enough
from tests.executor.test_gradient_norms import alone, loss_of, make
from tests.quick import full
from tests.ranks import RankPool

SMALL = {"bucket_mb": 1e-4}


def recorded(strategy: Strategy, micro_batches: int, most: int = 1 << 26) -> dict[str, Any]:
    """Of a step: its products, and where each parameter lies in its bucket."""
    with mock.patch.object(module, "MOST_ELEMENTS", most):
        return recorded_step(strategy, micro_batches)


def recorded_step(strategy: Strategy, micro_batches: int) -> dict[str, Any]:
    model = pl.parallelize(make(), strategy)
    engine, rank = pl.engine_of(model), pl.init().rank
    engine.record_gradient_norms()
    for micro_batch in pl.accumulate(model, range(micro_batches)):
        loss_of(model, rank, micro_batch).backward()
    found, again = engine.chunk_products(), engine.chunk_products()
    schedule, layout = engine.schedule, engine.layout
    pl.release(model)
    return {
        "products": {each.bucket: each.products for each in found},
        "again": again,
        "fits": is_small_enough(schedule),
        "chunks": schedule.shards if schedule.shards > 1 else schedule.world_size,
        "buckets": {b.name: (b, [layout.slots[slot] for slot in b.slots]) for b in schedule.reduced_buckets},
    }


@pytest.mark.parametrize(
    ("strategy", "n", "micro_batches"),
    [
        (Strategy(zero=2, **SMALL), 2, 2),
        full(Strategy(**SMALL), 3, 2),
        full(Strategy(zero=3, **SMALL), 3, 1),
        full(Strategy(zero=2, shard=2, **SMALL), 4, 1),
        full(Strategy(precision="bfloat16", **SMALL), 2, 1),
        full(Strategy(collective="parameter_server"), 2, 1),
    ],
)
def test_products_are_those_of_what_ranks_gave(ranks: RankPool, strategy: Strategy, n: int, micro_batches: int) -> None:
    found, *others = ranks(n, recorded, strategy, micro_batches)
    each_is_reduced = strategy.reduces_every_micro_batch
    # What was reduced last: with each reduced for itself, the last micro-batch alone.
    batches = range(micro_batches - 1, micro_batches) if each_is_reduced else range(micro_batches)
    own = [alone(rank, batches) for rank in range(n)]
    assert set(found["products"]) == set(found["buckets"]) and found["fits"]
    for name, (bucket, slots) in found["buckets"].items():
        rows = torch.zeros(n, bucket.numel)
        for rank in range(n):
            for slot in slots:
                if slot.spec.name in own[rank]:
                    place = rows[rank].as_strided(
                        slot.spec.shape, slot.spec.stride, rank * bucket.numel + slot.offset - bucket.start
                    )
                    place.copy_(own[rank][slot.spec.name])
        for index, products in enumerate(found["products"][name]):
            start, stop = chunk(index, found["chunks"], bucket.numel)
            part = rows[:, start:stop].double()
            expected = [float(part[a] @ part[b]) for a in range(n) for b in range(a, n)]
            rough = 0.03 if strategy.low else 1e-4
            scale = max(map(abs, expected), default=0.0)
            assert products == pytest.approx(expected, rel=rough, abs=rough * scale)
        assert len(found["products"][name]) == found["chunks"]
    # They are taken once, and are on rank 0 alone.
    assert found["again"] == [] and all(other["products"] == {} for other in others)


def test_too_much_is_not_copied(ranks: RankPool) -> None:
    for found in ranks(2, recorded, Strategy(**SMALL), 1, 100):
        assert not found["fits"] and found["products"] == {}
