"""The hash tells weights apart by any bit of any element, whatever their dtype and their place in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.buffers.weights_hash import weights_hash

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.complex128)


def weights(dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.arange(16).view(2, 8).to(dtype),
        torch.arange(15).view(3, 5).to(dtype),
        torch.tensor(1).to(dtype),
        torch.ones(0, dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_is_told(dtype: torch.dtype) -> None:
    same, other = weights(dtype), weights(dtype)
    assert weights_hash(same) == weights_hash(other) < 1 << 20
    for parameter in other[:3]:
        for element in range(parameter.numel()):
            kept = parameter.clone()
            parameter.view(-1)[element] += 1
            assert weights_hash(same) != weights_hash(other)
            parameter.copy_(kept)


def test_weights_that_changed_places_are_told() -> None:
    one, other = torch.ones(4), torch.zeros(4)
    assert weights_hash([one, other]) != weights_hash([other, one])


def test_where_weights_are_in_memory_and_in_which_order_does_not_matter() -> None:
    expected = torch.arange(24.0).view(1, 2, 3, 4)
    elsewhere = torch.cat([torch.zeros(1), expected.view(-1)])[1:].view_as(expected)
    channels_last = expected.to(memory_format=torch.channels_last)
    assert weights_hash([expected]) == weights_hash([elsewhere]) == weights_hash([channels_last])


def test_the_smallest_difference_is_told() -> None:
    weight = torch.full((1000,), 0.1)
    moved = weight.clone()
    moved[500] = torch.nextafter(weight[500], torch.tensor(1.0))
    assert weights_hash([weight]) != weights_hash([moved])
