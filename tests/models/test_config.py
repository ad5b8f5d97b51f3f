from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.models import PRESETS, ModelConfig, preset


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 130}, r"width must be a multiple of heads, got width 130 with 4 heads: use width 128 or 132"),
        ({"heads": 6}, r"use width 126 or 132, or heads 4 or 8"),
        ({"kv_heads": 3}, r"kv_heads must divide heads, got 3 for 4 heads: use 2 or 4"),
        ({"kv_heads": 8}, r"use 4\."),
        ({"position": "rotary", "width": 12}, r"12 / 4 = 3: use width 8 or 16"),
        ({"activation": "swiglu"}, r"swiglu needs ff.*here 352"),
        ({"layers": 0}, r"layers must be at least 1, got 0"),
        ({"ff": -1}, r"ff must be 0 .* got -1"),
        ({"norm": "batchnorm"}, r"norm must be layernorm or rmsnorm, got 'batchnorm'"),
        ({"norm_eps": 0.0}, r"norm_eps must be positive"),
        ({"rope_theta": float("nan")}, r"rope_theta must be positive"),
        ({"rope_theta": float("inf")}, r"rope_theta must be positive and finite, got inf"),
    ],
)
def test_impossible_shape_is_refused_with_numbers_that_would_do(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelConfig(**change)


@given(width=st.integers(1, 300), heads=st.integers(1, 40))
def test_every_number_suggested_for_width_or_heads_is_accepted(width: int, heads: int) -> None:
    try:
        ModelConfig(width=width, heads=heads)
    except UserError as error:
        widths, numbers = re.search(r"use width ([\d or]+), or heads ([\d or]+)\.", str(error)).groups()
        for suggested in widths.split(" or "):
            ModelConfig(width=int(suggested), heads=heads)
        for suggested in numbers.split(" or "):
            ModelConfig(width=width, heads=int(suggested))
    else:
        assert width % heads == 0


def test_derived_widths_follow_the_defaults_and_yield_to_given_ones() -> None:
    config = ModelConfig(width=96, heads=6)
    assert (config.key_value_heads, config.feed_forward, config.head_width) == (6, 384, 16)
    config = dataclasses.replace(config, kv_heads=2, ff=100)
    assert (config.key_value_heads, config.feed_forward) == (2, 100)


def test_default_configuration_is_the_tiny_preset() -> None:
    assert ModelConfig() == PRESETS["tiny"] == preset("tiny")


def test_unknown_preset_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(UserError, match=r"'lama-8b': did you mean 'llama-8b'\?.*nano, tiny"):
        preset("lama-8b")
    with pytest.raises(UserError, match=r"no model preset 'xyzzy': Known presets: nano"):
        preset("xyzzy")
