from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.models.on_meta import on_meta
from paceline.plan.rough_work import rough_work
from paceline.plan.trace import trace

EXPERTS, ROWS, WIDTH, INNER = 4, 48, 16, 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (x.shape[0] // EXPERTS)
        inside = nn.functional.grouped_mm(x, self.up, offs=ends).relu()
        return nn.functional.grouped_mm(inside, self.down, offs=ends)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_grouped_products_are_traced_in_any_precision(precision: str) -> None:
    work = trace(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts()), ROWS, inputs=torch.empty(1, WIDTH), precision=precision
    )
    assert (work.source, work.warnings) == ("trace", ())
    products = [each for unit in work.units for each in unit.forward if each.name == "_grouped_mm"]
    assert [each.flops for each in products] == [2 * ROWS * WIDTH * INNER] * 2
    assert {each.dtype for each in products} == {precision}
    # Each row is in one group, forward and backward: thrice two products, beside the first layer's two.
    assert work.flops == 3 * 2 * 2 * ROWS * WIDTH * INNER + 2 * 2 * ROWS * WIDTH * WIDTH


@pytest.mark.full
def test_a_mixture_of_transformers_is_traced_in_float32_as_in_bfloat16() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, intermediate_size=96,
        vocab_size=100, num_local_experts=4,
    )  # fmt: skip
    model = on_meta(lambda: transformers.MixtralForCausalLM(config))
    wide, narrow = (trace(model, length=32, precision=each) for each in ("float32", "bfloat16"))
    assert wide.warnings == narrow.warnings == ()
    products = [
        sum(each.flops * each.count for unit in work.units for each in unit.forward if each.kind == "matmul")
        for work in (wide, narrow)
    ]
    assert products[0] == products[1] > 0


def test_what_matrices_alone_tell_of_experts_is_one_expert_for_each_row() -> None:
    work = rough_work(nn.Sequential(Experts(), nn.Conv1d(3, 5, 7), nn.EmbeddingBag(50, 4)), ROWS, ROWS)
    assert work.flops == 3 * 2 * ROWS * (2 * WIDTH * INNER + 3 * 5 * 7)


def test_a_table_that_is_the_output_layer_too_is_a_matrix_and_a_frozen_one_has_no_gradient() -> None:
    tied = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50, bias=False))
    tied[1].weight = tied[0].weight
    assert rough_work(tied, ROWS, ROWS).flops == 3 * 2 * ROWS * 50 * 4
    frozen = nn.Linear(4, 50).requires_grad_(False)
    assert rough_work(nn.Sequential(frozen, nn.Linear(50, 6)), ROWS, ROWS).flops == 2 * ROWS * 50 * (2 * 4 + 3 * 6)
