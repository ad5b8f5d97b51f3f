from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.models.presets import PRESETS
from paceline.plan.fsdp2 import Fsdp2

LLAMA = Fsdp2(PRESETS["llama-8b"], samples=1, shards=8, kept="operations")


def test_16_bytes_of_a_parameter_are_divided_among_the_ranks() -> None:
    more = LLAMA.reserved - replace(LLAMA, shards=128).reserved
    assert more == pytest.approx(16 * LLAMA.parameters * (1 / 8 - 1 / 128))


def test_logits_are_held_in_14_bytes_or_18_of_each_part_and_compiled_in_4() -> None:
    logits = LLAMA.tokens * 128256
    assert LLAMA.logits == replace(LLAMA, compiled=True).logits == 14 * logits
    assert replace(LLAMA, tensor=8).logits == 18 * logits / 8
    assert replace(LLAMA, compiled_loss=True).logits == 4 * logits


def test_recomputing_more_holds_less() -> None:
    whole = replace(LLAMA, kept="all")
    held = [whole, replace(whole, kept="input", recomputed=0.5), LLAMA, replace(LLAMA, kept="input")]
    assert [each.reserved for each in held] == sorted((each.reserved for each in held), reverse=True)


def test_tensor_ranks_and_stages_hold_less() -> None:
    assert replace(LLAMA, tensor=4).reserved < LLAMA.reserved
    assert replace(LLAMA, pipeline=4, samples=8, micro_batches=8).logits == LLAMA.logits
    assert replace(LLAMA, pipeline=4, samples=8, micro_batches=8).activations == pytest.approx(LLAMA.activations)
    # Of as many micro-batches as stages the first stage holds all.
    all_held = replace(LLAMA, pipeline=4, samples=8, micro_batches=4)
    assert all_held.activations == pytest.approx(2 * LLAMA.activations)


def test_stages_add_whole_gradients_up_in_fp32_until_the_last_micro_batch() -> None:
    stages = replace(LLAMA, pipeline=4, samples=8, micro_batches=8)
    assert LLAMA.accumulated == 0
    assert stages.accumulated == 4 * stages.parameters
    # Of states and sums the former alone are divided among more ranks.
    many = replace(stages, shards=10**9)
    assert many.reserved > stages.accumulated + 2 * stages.parameters
