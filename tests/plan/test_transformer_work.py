from __future__ import annotations

from collections.abc import Iterable

import pytest

from paceline.models.config import ModelConfig
from paceline.models.flops import flops_per_token
from paceline.models.presets import PRESETS
from paceline.plan.transformer_work import Software, transformer_work
from paceline.plan.work import Operation, UnitWork


@pytest.mark.parametrize("name", ["gpt2-1.5b", "llama-8b", "llama-70b"])
def test_without_the_causal_half_and_recomputed_scores_it_is_the_models_flops(name: str) -> None:
    shape = PRESETS[name]
    work = transformer_work(shape, 2, 1024, software=Software(fused_attention=False))
    assert work.flops == pytest.approx(work.tokens * flops_per_token(shape, 1024))


def test_a_fused_causal_kernel_computes_half_of_the_scores_and_once_more_in_backward() -> None:
    shape = PRESETS["llama-8b"]
    work = transformer_work(shape, 1, 8192)
    scores = work.flops - 6 * 8192 * (flops_per_token(shape, 0) // 6)
    # Seven products of 2 s^2 h a layer, half of each.
    assert scores == pytest.approx(7 * 2 * 8192**2 * 4096 * 32 / 2)


def test_tensor_ranks_divide_the_matmuls() -> None:
    shape = ModelConfig(layers=4, width=1024, heads=16, context=512, vocabulary=50432)
    whole, part = (transformer_work(shape, 4, 512, tensor=tensor) for tensor in (1, 8))
    assert part.flops == pytest.approx(whole.flops / 8)


def test_rmsnorm_of_single_operations_passes_over_the_stream_more_often_than_one_kernel() -> None:
    def moved(norm: str, compiled: bool) -> float:
        shape = ModelConfig(layers=1, width=1024, heads=8, context=512, vocabulary=512, norm=norm)  # type: ignore[arg-type]
        block = transformer_work(shape, 1, software=Software(compiled=compiled)).units[1]
        return sum(op.bytes * op.count for op in block.forward if op.kind == "memory")

    assert moved("rmsnorm", False) - moved("layernorm", False) == 2 * 16 * 512 * 1024 * 2
    assert moved("rmsnorm", True) == moved("layernorm", True)


@pytest.mark.parametrize(("compiled", "passes"), [(True, 1), (False, 3)])
def test_separate_products_compute_as_much_and_move_the_stream_more_often(compiled: bool, passes: int) -> None:
    shape = ModelConfig(layers=1, width=1024, heads=8, kv_heads=2, context=512, activation="swiglu", ff=4096)

    def block(separate: bool) -> UnitWork:
        how = Software(compiled=compiled, separate=separate)
        return transformer_work(shape, 1, software=how, tensor=2, sequence_parallel=True).units[1]

    def moved(operations: Iterable[Operation], kind: str) -> float:
        return sum(op.bytes * op.count for op in operations if op.kind == kind)

    fused, apart = block(False), block(True)
    assert apart.flops == fused.flops
    # Two of queries, keys and values and one of the gate beside the other: of all tokens, as they are multiplied.
    stream = 3 * 512 * 1024 * 2
    assert moved(apart.forward, "matmul") - moved(fused.forward, "matmul") == stream
    assert moved(apart.backward, "matmul") - moved(fused.backward, "matmul") == 2 * stream
    assert moved(apart.backward, "memory") - moved(fused.backward, "memory") == passes * stream
    assert [op.shape[-1] for op in apart.forward if op.kind == "matmul"] == [512, 128, 128, 1024, 2048, 2048, 1024]


def test_with_a_scale_for_each_row_backward_casts_twice_as_often() -> None:
    shape = ModelConfig(layers=1, width=1024, heads=8, context=512)

    def casting(row_scales: bool) -> list[float]:
        block = [
            transformer_work(shape, 1, dtype=dtype, software=Software(row_scales=row_scales)).units[1]
            for dtype in ("float8", "bfloat16")
        ]
        return [
            sum(op.bytes * op.count for op in ops if op.kind == "memory")
            - sum(op.bytes * op.count for op in plain if op.kind == "memory")
            for ops, plain in ((block[0].forward, block[1].forward), (block[0].backward, block[1].backward))
        ]

    (forward, backward), (by_rows, back_by_rows) = casting(False), casting(True)
    assert by_rows == forward > 0
    assert back_by_rows == 2 * backward == 4 * forward


def test_complex_numbers_are_turned_alike_compiled_or_not() -> None:
    def turning(compiled: bool, complex_rotary: bool) -> float:
        how = Software(compiled=compiled, complex_rotary=complex_rotary)
        moved = []
        for position in ("rotary", "learned"):
            shape = ModelConfig(layers=1, width=1024, heads=8, kv_heads=2, context=512, position=position)  # type: ignore[arg-type]
            block = transformer_work(shape, 1, software=how).units[1]
            moved.append(sum(op.bytes * op.count for op in block.forward if op.kind == "memory"))
        return moved[0] - moved[1]

    turned = 512 * (8 + 2) * 128 * 2
    assert turning(True, False) == 2 * turned
    assert turning(True, True) == turning(False, True) == turning(False, False) == 10 * turned
