"""Tensors that are not dense, handed from block to block."""

from __future__ import annotations

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state, trained


@idiom()
def jagged_tensors_between_blocks(side: Side) -> Found:
    """Nested tensors, whose memory is that of the tensors which they are made of."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.nested.nested_tensor_from_jagged(self.linear(x.values()).tanh(), x.offsets())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 2)

        def forward(self, x):
            rows = torch.nested.nested_tensor_from_jagged(x.repeat_interleave(2, 0), torch.arange(0, 2 * len(x) + 1, 2))
            for block in self.blocks:
                rows = block(rows)
            return self.head(rows.values().view(len(x), 2, WIDTH).sum(1))

    torch.manual_seed(0)
    return trained(side, Model())


@idiom(low=False)
def a_sparse_matrix_made_by_a_block(side: Side) -> Found:
    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.linspace(-1, 1, 6))

        def forward(self):
            return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2, 3, 5, 7], [0, 2, 4, 6, 7, 1]]), self.weights, (8, 8))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges, self.head = nn.ModuleList(Edges() for _ in range(2)), nn.Linear(WIDTH, 2)

        def forward(self, x):
            for edges in self.edges:
                x = torch.sparse.mm(edges(), x.t()).t()
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


@idiom(
    refused=tuple(
        (place, "are two parameters in the same memory")
        for place in ("zero 1", "zero 2", "zero 3", "low", "parameter server")
    )
)
def weights_tied_by_their_data(side: Side) -> Found:
    """Two parameters in one memory, each with gradients and momentum of its own."""
    model = mlp(side)
    model[2][0].weight.data = model[1][0].weight.data
    fit(side, side.parallel(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    assert torch.equal(model[2][0].weight, model[1][0].weight)
    return state(model)
