"""What chance decides in a model happens in a trace as often as probability tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.plan.trace import trace
from tests.plan.test_likely_values import SAMPLES, TOKENS, WIDTH, X


class Draws(nn.Module):
    """A head of the rows alone that chance keeps, and blocks that it seldom leaves out."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.draw, self.head = draw, nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) < 0.01 or torch.bernoulli(torch.full((), 0.01)).bool():
                continue
            x = block(x)
        return self.head(x[:, self.draw()])


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(TOKENS) < 0.25,
        lambda: torch.rand(TOKENS).argsort() < TOKENS // 4,
        lambda: torch.randperm(TOKENS) > TOKENS - TOKENS // 4 - 1,
        lambda: torch.bernoulli(torch.full((TOKENS,), 0.25)).bool(),
        lambda: torch.rand(TOKENS) < torch.full((TOKENS,), 0.25),
        lambda: ~(torch.rand(TOKENS) >= 0.25),
        lambda: torch.empty(TOKENS).uniform_() <= 0.25,
    ],
)
def test_chance_keeps_as_many_as_probability_tells(draw: Callable[[], Tensor]) -> None:
    work = trace(Draws(draw), SAMPLES, inputs=X)
    products = [each for unit in work.units for each in unit.forward if each.kind == "matmul"]
    assert sum(each.count for each in products) == 4
    (head,) = (each for each in products if each.shape[3] == 2 * WIDTH)
    assert head.shape[1] == SAMPLES * TOKENS // 4
