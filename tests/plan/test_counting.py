from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.counting import uncounted
from paceline.plan.observed_pass import ObservedPass
from paceline.plan.work import Operation


def counted(compute: Callable[[], Tensor]) -> list[Operation]:
    """Of forward and backward, on tensors that are real."""
    with ObservedPass([]) as seen:
        result = compute()
        seen.turn()
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    return [*seen.forward[""], *seen.backward[""]]


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: F.linear(weight(3, 5, 8), weight(6, 8), weight(6)),
        lambda: weight(4, 3, 5) @ weight(4, 5, 7),
        lambda: torch.baddbmm(weight(4, 3, 7), weight(4, 3, 5), weight(4, 5, 7)),
        lambda: F.conv2d(weight(2, 3, 9, 9), weight(5, 3, 3, 3), stride=2),
        lambda: F.conv1d(weight(2, 3, 9), weight(5, 3, 4)),
        lambda: F.conv_transpose2d(weight(2, 3, 5, 5), weight(3, 4, 3, 3)),
    ],
)
def test_products_count_as_in_torchs_own_counter(compute: Any) -> None:
    with FlopCounterMode(display=False) as torchs:
        result = compute()
        result.backward(torch.ones_like(result))
    assert sum(each.flops * each.count for each in counted(compute)) == torchs.get_total_flops() > 0


def test_a_bilinear_layer_multiplies_two_inputs_by_each_matrix() -> None:
    layer = torch.nn.Bilinear(16, 24, 5)
    found = counted(lambda: layer(weight(3, 16), weight(3, 24)))
    # Forward, and the gradients of both inputs and of the weight.
    assert [(each.flops, each.count) for each in found if each.kind == "matmul"] == [(2.0 * 3 * 16 * 24 * 5, 1)] * 4


def test_a_product_that_is_added_in_place_counts() -> None:
    found = counted(lambda: weight(3, 7).detach().addmm_(weight(3, 6).detach(), weight(6, 7).detach()))
    products = [(each.flops, each.shape) for each in found if each.kind == "matmul"]
    assert products == [(2.0 * 3 * 6 * 7, (1, 3, 6, 7))]


def test_a_grouped_convolution_multiplies_within_groups() -> None:
    given, kernel = weight(2, 6, 8), weight(6, 2, 3)
    (forward, backward) = [
        each for each in counted(lambda: F.conv1d(given, kernel, padding=1, groups=3)) if each.kind == "matmul"
    ]
    assert forward.shape == (3, 16, 6, 2) and forward.flops == 2 * 2 * 8 * 6 * (2 * 3)
    assert (backward.flops, backward.count) == (forward.flops, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_what_kernels_compute(causal: bool) -> None:
    q, k, v = (weight(2, 4, 16, 8) for _ in range(3))
    found = [
        each
        for each in counted(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
        if each.kind == "attention"
    ]
    whole = 4.0 * 2 * 4 * 16 * 16 * 8
    assert [each.flops for each in found] == [share * whole / (2 if causal else 1) for share in (1.0, 2.5)]
    assert found[0].shape == (8, 16, 16, 8)


@pytest.mark.parametrize(
    ("compute", "moved"),
    [
        (lambda: torch.ones(1000).view(10, 100).t(), 4000),
        (lambda: torch.ones(1000) + 1, 4000 + 8000),
        (lambda: torch.ones(10).expand(100, 10) + 1, 40 + 40 + 4000),
        (lambda: F.embedding(torch.zeros(5, dtype=torch.int64), torch.ones(1000, 8)), 40 + 32000 + 2 * 160 + 40),
        (lambda: torch.ones(100).add_(1), 400 + 800),
    ],
)
def test_memory_operations_move_what_they_read_and_write(compute: Any, moved: int) -> None:
    """Views move nothing, expanded tensors what is there, tables the rows that are looked up."""
    assert sum(each.bytes * each.count for each in counted(compute)) == moved


@pytest.mark.parametrize("columns", [64, 50257])
def test_products_are_aligned_where_all_rows_are(columns: int) -> None:
    x, weight = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((6, 8), (columns, 8)))
    logits = x @ weight.t()
    for compute in (lambda: x @ weight.t(), lambda: logits @ weight, lambda: logits.t() @ x):
        (found,) = counted(compute)
        assert found.kind == "matmul" and found.aligned == (columns == 64)
    # An odd number of rows moves no row's beginning, and vectors have none.
    assert all(each.aligned for each in counted(lambda: x[:5] @ weight[:64].t()))
    assert all(each.aligned for each in counted(lambda: weight @ x[0]))


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda x: torch.linalg.eigvalsh(x @ x.mT), {"_linalg_eigh"}),
        (lambda x: torch.linalg.inv(x @ x.mT), {"linalg_inv_ex"}),
        (lambda x: torch.linalg.vector_norm(x), set()),
        (lambda x: F.gelu(x).sqrt().rsqrt(), set()),
    ],
)
def test_what_decomposes_matrices_is_not_taken_for_one_pass_over_them(
    compute: Callable[[Tensor], Tensor], told: set[str]
) -> None:
    with ObservedPass([]) as seen:
        compute(torch.eye(8) + 1)
    assert seen.unknown == told


@pytest.mark.parametrize(
    ("func", "multiplies"),
    [
        (torch.ops.aten.cummax.default, False),
        (torch.ops.aten.upsample_bilinear2d.default, False),
        (torch.ops.aten.upsample_trilinear3d.default, False),
        (torch.ops.aten._thnn_fused_gru_cell.default, True),
        (torch.ops.aten._int_mm.default, True),
    ],
)
def test_only_names_of_products_are_told_as_not_counted(func: Any, multiplies: bool) -> None:
    assert uncounted(func, Operation("memory", 0.0, 8.0, "float32", name="other")) == multiplies
