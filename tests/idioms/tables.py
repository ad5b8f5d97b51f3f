"""Embeddings: tied, grown, sparse."""

from __future__ import annotations

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, state


@idiom()
def an_embedding_grown_before(side: Side) -> Found:
    """Rows added and tied to the head before parallelize."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 6, bias=False)
            old = self.table
            self.table = nn.Embedding(7, WIDTH)
            with torch.no_grad():
                self.table.weight[:6].copy_(old.weight)
            self.head = nn.Linear(WIDTH, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens).cumsum(1).tanh())

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        tokens = side.rows((side.tensor(8, 5, seed=step).abs() * 3).long().clamp(max=6))
        logits = net(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


class SparseTable(nn.Module):
    """A table whose gradients are sparse, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, WIDTH, sparse=True), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.table((x[:, 0].abs() * 2).long().clamp(max=5)))


@idiom()
def a_sparse_table(side: Side) -> Found:
    torch.manual_seed(0)
    model = SparseTable().to(side.dtype)
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return state(model)


@idiom(
    refused=(("zero 3", "SparseAdam may need whole parameters"), ("parameter server", "needs gradients on every rank"))
)
def a_sparse_table_with_its_optimizer(side: Side) -> Found:
    torch.manual_seed(0)
    model = SparseTable().to(side.dtype)
    net = side.parallel(model)
    optimizers = [
        torch.optim.SparseAdam(model.table.parameters(), 0.01),
        torch.optim.Adam(model.head.parameters(), 0.01),
    ]
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


MAX_NORM = r"0.weight was edited, .*: nn.Embedding\(max_norm=...\) does that in its forward"


@idiom(against="ddp", refused=tuple((place, MAX_NORM) for place in ("zero 3", "low", "shared parameters")))
def a_table_with_a_largest_norm(side: Side) -> Found:
    """Of which all ranks look up the same rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 2)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        y = side.batch(step)[1]
        (net(torch.arange(len(y)) % 4) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)
