"""Embeddings with `sparse=True`: their gradients are those of a dense one, and dense once a backward has ended."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from tests.engine.models import Stack, assert_all_same, gradients, in_parallel, make, rows, several_ranks, snapshot
from tests.quick import full


class Looked(Stack):
    """Adds rows of a table, some looked up more than once, and one that stays unused in some steps."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        looked_up = (x[:, 0] * 2).long().clamp(-3, 3) + 4
        return super().forward(x) + self.table(looked_up) + self.table(looked_up // 2)


Sparse, Dense = partial(Looked, True), partial(Looked, False)


def in_micro_batches(model: nn.Module) -> list[dict[str, Tensor]]:
    """A loop that accumulates, keeps a step's gradients for the next in between, and clips."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel = hasattr(model, "_paceline_engine")
    found = []
    for step in range(4):
        parts = [(x, y) for x, y in zip(*(batch.chunk(3) for batch in rows(model, step)), strict=True)]
        for x, y in pl.accumulate(model, parts) if parallel else parts:
            (F.mse_loss(model(x), y) / len(parts)).backward()
        found.append(gradients(model))
        if step == 1:
            # Without a step: the next one's are added to these.
            continue
        (pl.clip_grad_norm_ if parallel else lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm))(
            model, 0.5
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*found, snapshot(model)]


@several_ranks
def test_sparse_gradients_are_those_of_a_dense_table(ranks, strategy, n) -> None:
    for found in ranks(n, in_parallel, strategy, Sparse, in_micro_batches):
        assert_all_same(found, in_micro_batches(make(Dense)))


class Bags(nn.Module):
    """Sums rows of one table and looks up another's."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(12, 3, mode="sum", sparse=True)
        self.table, self.head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (x * 3).long().clamp(-3, 3) + 4
        return self.head(self.bags(numbers) + self.table(numbers[:, 0] // 2))


def of_rows(zeroes: str, accumulates: bool, strategy: pl.Strategy | None = None) -> list[dict[str, Tensor]]:
    """Weights after each step of optimizers that let only rows go on by their momentum that were touched."""
    torch.manual_seed(4)
    model = Bags().double()
    if strategy is not None:
        pl.parallelize(model, strategy)
    tables = [torch.optim.SparseAdam([table.weight], 0.05) for table in (model.bags, model.table)]
    optimizers, found = [*tables, torch.optim.SGD(model.head.parameters(), 0.1)], []
    for step in range(6):
        parts = list(zip(*(batch.chunk(2) for batch in rows(model, step)), strict=True))
        for x, y in pl.accumulate(model, parts) if strategy is not None and accumulates else parts:
            # Others in each step.
            x = x.abs() if step % 2 else -x.abs()
            # Rows are looked up, and get zeros.
            counts = (x[:, :1].abs() > 0.3).double()
            ((model(x) - y).square() * counts).mean().backward()
        if step == 2:
            # A batch that is given up.
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zeroes == "dropped")
            continue
        for optimizer in optimizers[step % 2 :]:
            optimizer.step()
        for optimizer in optimizers if zeroes != "kept" or step % 3 else ():
            optimizer.zero_grad(set_to_none=zeroes == "dropped")
        found.append(snapshot(model))
    if strategy is not None:
        pl.release(model)
    return found


@pytest.mark.parametrize("accumulates", [True, full(False)])
@pytest.mark.parametrize("zeroes", ["dropped", full("zeroed"), full("kept")])
@pytest.mark.parametrize("zero", [0, full(1), 2])
def test_sparse_adam_updates_rows_that_some_rank_has_touched(ranks, zero: int, zeroes: str, accumulates: bool) -> None:
    alone = of_rows(zeroes, accumulates)
    for found in ranks(2, of_rows, zeroes, accumulates, pl.Strategy(zero=zero, bucket_mb=1e-4)):
        assert_all_same(found, alone)
