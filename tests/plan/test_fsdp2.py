from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.presets import PRESETS
from paceline.plan.fsdp2 import Fsdp2

LLAMA = Fsdp2(PRESETS["llama-8b"], samples=1, shards=8, kept="operations")


def test_16_bytes_of_a_parameter_are_divided_among_the_ranks() -> None:
    more = LLAMA.reserved - replace(LLAMA, shards=128).reserved
    assert more == pytest.approx(16 * LLAMA.parameters * (1 / 8 - 1 / 128))


def test_logits_are_held_in_12_bytes_and_compiled_in_4() -> None:
    assert LLAMA.logits == 12 * LLAMA.tokens * 128256
    assert replace(LLAMA, compiled=True).logits == LLAMA.logits / 3


def test_recomputing_more_holds_less() -> None:
    whole = replace(LLAMA, kept="all")
    held = [whole, replace(whole, kept="input", recomputed=0.5), LLAMA, replace(LLAMA, kept="input")]
    assert [each.reserved for each in held] == sorted((each.reserved for each in held), reverse=True)


def test_tensor_ranks_and_stages_hold_less() -> None:
    assert replace(LLAMA, tensor=4).reserved < LLAMA.reserved
    assert replace(LLAMA, pipeline=4, samples=8).logits == LLAMA.logits
    assert replace(LLAMA, pipeline=4, samples=8).activations == pytest.approx(LLAMA.activations)
