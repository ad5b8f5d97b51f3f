"""A parameter is given another one's gradient: as in one process, or refused before any weight has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.strategy import Strategy
from tests.quick import pairwise, some


class Gated(nn.Module):
    """Parameters of one element, and weights of equal shapes: ranks have the same of some, and of others not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([1.0]))
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return (self.last(x) * self.gate + self.shift.square()).square().mean()


Exchange = Callable[[nn.Parameter, nn.Parameter], None]


def swap(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad, other.grad = other.grad, one.grad


def share(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad = other.grad


def scaled(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad = None
    one.grad = 2 * other.grad.clone()  # type: ignore[union-attr]


def data(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad.data = other.grad.data  # type: ignore[union-attr]


def added(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad = one.grad + other.grad  # type: ignore[operator]


def in_place(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad.add_(other.grad)  # type: ignore[union-attr]


def in_lists(one: nn.Parameter, other: nn.Parameter) -> None:
    torch._foreach_add_([one.grad, other.grad], [other.grad, other.grad])  # type: ignore[list-item]


EXCHANGES: list[Exchange] = [swap, share, scaled, data, added, in_place, in_lists]
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, fused=True),
    "Adam, fused": partial(torch.optim.Adam, lr=0.1, fused=True),
}
PAIRS = [("gate", "shift"), ("first.weight", "last.weight"), ("middle.bias", "last.bias")]


Case = tuple[Exchange, str, tuple[str, str], bool]


def trained(case: Case, strategy: Strategy | None) -> Tensor:
    """Weights after a step with exchanged gradients, to which those of another backward are added if it says so."""
    exchange, optimizer, pair, again = case
    torch.manual_seed(0)
    model: nn.Module = Gated().double()
    if strategy is not None:
        model = pl.parallelize(model, strategy)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    named = dict(model.named_parameters())
    try:
        model(torch.ones(2, 6, dtype=torch.float64)).backward()
        exchange(*(named[name] for name in pair))
        if again:
            model(torch.full((2, 6), 0.5, dtype=torch.float64)).backward()
        stepping.step()
    except pl.EngineError:
        pl.reset(model)
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return torch.zeros(())
    finally:
        found = {name: value.clone() for name, value in model.state_dict().items()}
        if strategy is not None:
            pl.release(model)
    return torch.cat([value.flatten() for value in found.values()])


@cache
def alone(case: Case) -> Tensor:
    return trained(case, None)


CASES = [
    (exchange, optimizer, pair, again)
    for exchange in EXCHANGES
    for optimizer in OPTIMIZERS
    for pair in PAIRS
    # One tensor as two parameters' gradient adds up to what only autograd alone makes of it.
    for again in sorted({False, exchange not in (share, data)})
]


def on_rank(cases: list[Case], strategy: Strategy) -> list[Tensor]:
    return [trained(case, strategy) for case in cases]


STRATEGIES = {
    f"zero {zero}, N={ranks}{', small buckets' if bucket else ''}": (Strategy(zero=zero, **bucket), ranks)
    for zero in (0, 1, 2, 3)
    for ranks, bucket in ((2, {"bucket_mb": 2e-4}), (3, {}))
}


@pytest.mark.parametrize("name", some(STRATEGIES, {"zero 2, N=2, small buckets"}))
def test_it_is_as_in_one_process_or_refused(ranks, name: str) -> None:
    strategy, n = STRATEGIES[name]
    # Each pair of values at every strategy, each time with others beside it.
    turn = list(STRATEGIES).index(name) * len(CASES) // len(STRATEGIES)
    cases = pairwise(CASES[turn:] + CASES[:turn])
    for found in ranks(n, on_rank, cases, strategy):
        refused = 0
        for case, mine in zip(cases, found, strict=True):
            if not mine.dim():
                refused += 1
                continue
            torch.testing.assert_close(mine, alone(case), atol=1e-12, rtol=0, msg=str(case))
        assert (strategy.zero > 0) >= (refused > 0) and refused < len(cases)
