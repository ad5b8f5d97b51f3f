"""Values come back as they were, and what would run is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.plain import decode, encode
from paceline.core.errors import UserError

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


def back(value: Any) -> Any:
    """What comes out of a file."""
    aside: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> str:
        aside[f"tensor {len(aside)}"] = tensor.reshape(-1)
        return f"tensor {len(aside) - 1}"

    return decode(json.loads(json.dumps(encode(value, put, "extra"), allow_nan=False)), aside.__getitem__)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return type(other) is float and (one == other or (math.isnan(one) and math.isnan(other)))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@given(nested)
def test_nested_values_come_back(value: Any) -> None:
    assert same(value, back(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_with_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = back({"a": [tensor]})["a"][0]
    assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_what_states_hold_besides() -> None:
    assert back(Counter({30: 1, 80: 2})) == Counter({30: 1, 80: 2}) and type(back(Counter())) is Counter
    assert back(OrderedDict(a=1)) == {"a": 1}
    assert back({"$tensor": 1}) == {"$tensor": 1}
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    assert (back(array) == array).all() and back(array).dtype == np.uint32
    assert back(np.float64(0.5)) == 0.5 and back(torch.tensor(math.nan)).isnan()


@pytest.mark.parametrize("value", [object(), print, {1, 2}, 1j, torch.float32, np.array(["a"])])
def test_what_could_not_be_read_without_running_code_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(UserError, match=r"extra\['deep'\]\[1\] is a "):
        back({"deep": [0, value]})


@pytest.mark.parametrize(
    "value", [{"$import": "os"}, {"$float": "1"}, {"$tensor": 3}, {"$tuple": 1}, {"$scalar": ["load", 1]}, {"$dict": 2}]
)
def test_what_no_value_is_said_like_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is no kind of value"):
        decode([value], {}.__getitem__)
