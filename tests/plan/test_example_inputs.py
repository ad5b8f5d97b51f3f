"""What a model is traced with, and what may not be as it is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.plan.example_inputs import example_inputs
from paceline.plan.trace import trace


def test_a_module_that_takes_sequences_first_is_doubted() -> None:
    """Its steps of time would be taken for samples, silently."""

    def doubts(first: bool) -> tuple[str, ...]:
        return trace(nn.Sequential(nn.RNN(8, 8, batch_first=first), Last()), 2, inputs=torch.zeros(4, 3, 8)).warnings

    assert doubts(True) == ()
    (doubt,) = doubts(False)
    assert "RNN 0 takes sequences first" in doubt


class Last(nn.Module):
    def forward(self, results: tuple[Tensor, Tensor]) -> Tensor:
        return results[0]


def test_a_model_whose_inputs_are_not_known_asks_for_them() -> None:
    with pytest.raises(UserError, match=r"return \(model, example\)"):
        trace(nn.Linear(3, 3), 2)


def test_bags_of_indices_in_one_dimension_are_doubted() -> None:
    bags = nn.EmbeddingBag(16, 8)
    (told,) = trace(bags, 2, inputs=(torch.zeros(80, dtype=torch.int64), torch.arange(0, 80, 20))).warnings
    assert "EmbeddingBag may take indices of several bags" in told
    assert not trace(bags, 2, inputs=torch.zeros(4, 20, dtype=torch.int64)).warnings


@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.int64, 14), (torch.int32, 14), (torch.bool, 2), (torch.uint8, 2), (torch.cfloat, 2)]
)
def test_whole_numbers_in_two_dimensions_are_token_ids(dtype: torch.dtype, tokens: int) -> None:
    assert example_inputs(nn.Linear(7, 1), 2, 0, torch.zeros(1, 7, dtype=dtype)).tokens == tokens
