"""What blocks leave behind beside their results, in lists or on themselves, is traced for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.trace import trace

WIDTH = 16


class Block(nn.Module):
    """Makes something beside its result, of which the model's loss is made too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.begun: Tensor | None = None

    def forward(self, x: Tensor, found: Any = None) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        if isinstance(found, list):
            found.append(self.aside(y))
        elif isinstance(found, dict):
            found[len(found)] = self.aside(y)
        elif found is not None:
            self.begun = self.aside(y)
        else:
            self.left = self.aside(y)
        return y


class Model(nn.Module):
    def __init__(self, gather: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.gather = nn.ModuleList(Block() for _ in range(12)), gather

    def forward(self, x: Tensor) -> Tensor:
        return self.gather(self.blocks, x)


def in_a_list(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    for block in blocks:
        x = block(x, found)
    return x.sum() + torch.stack(found).sum()


def in_a_dictionary(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    found: dict[int, Tensor] = {}
    for block in blocks:
        x = block(x, found)
    return x.sum() + torch.cat(list(found.values())).sum()


def on_themselves(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x.sum() + torch.stack([block.left for block in blocks]).sum()  # type: ignore[arg-type]


def where_something_was(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, True)
    return x.sum() + sum(block.begun.sum() for block in blocks if block.begun is not None)  # type: ignore[operator]


@pytest.mark.parametrize("gather", [in_a_list, in_a_dictionary, on_themselves, where_something_was])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_counts(gather: Callable[[nn.ModuleList, Tensor], Tensor], precision: str) -> None:
    work = trace(Model(gather), 4, inputs=torch.empty(4, WIDTH), precision=precision)
    with FlopCounterMode(display=False) as counted:
        Model(gather)(torch.zeros(4, WIDTH)).backward()
    assert work.source == "trace"
    assert work.flops == counted.get_total_flops()
