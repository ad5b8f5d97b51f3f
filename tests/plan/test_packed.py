from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.models.on_meta import on_meta
from paceline.plan.trace import trace
from paceline.plan.work import Operation
from tests.quick import some

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 3


def attention_of(kind: str, **more: Any) -> list[Operation]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=LAYERS, intermediate_size=96, vocab_size=100
    )
    for name, value in more.items():
        setattr(config, name, value)
    model = on_meta(lambda: getattr(transformers, f"{kind}ForCausalLM")(config))
    work = trace(model, length=CONTEXT, precision="bfloat16")
    return [op for unit in work.units for op in unit.forward if op.kind == "attention"]


@pytest.mark.parametrize("kind", some(["Llama", "Qwen2", "GPTNeoX", "Mixtral"], {"Mixtral"}))
def test_samples_that_are_not_packed_need_no_mask_and_half_of_the_scores(kind: str) -> None:
    found = attention_of(kind, num_key_value_heads=HEADS)
    assert sum(op.count for op in found) == LAYERS
    # Two products of the whole scores would be 4 h s^2.
    assert {op.flops for op in found} == {2 * WIDTH * CONTEXT**2}
    assert {op.name for op in found} == {"_scaled_dot_product_flash_attention"}


def test_what_transformers_finds_out_by_itself_is_left_to_it() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    was = masking.find_packed_sequence_indices
    attention_of("Llama")
    assert masking.find_packed_sequence_indices is was
    packed = masking.find_packed_sequence_indices(torch.tensor([[0, 1, 2, 0, 1]]))
    assert packed.tolist() == [[0, 0, 0, 1, 1]]
