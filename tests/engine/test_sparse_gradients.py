"""Embeddings with `sparse=True`: their gradients are those of a dense one, and dense once a backward has ended."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from tests.engine.models import Stack, assert_all_same, gradients, in_parallel, make, rows, several_ranks, snapshot


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
