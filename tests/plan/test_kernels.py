from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import UserError
from paceline.plan.hardware import Device, Hardware, Kernels, Link, Rates
from paceline.plan.kernels import UNALIGNED, seconds, total
from paceline.plan.work import Operation

DEVICE = Device("made up", 80 << 30, 2e12, {"bfloat16": 3e14}, {"bfloat16": 2e14})
HARDWARE = Hardware(DEVICE, Kernels(1e-5, 0.8, 0.9, 1e10, 0.5), 8, Link(0.0, 2e11), Link(0.0, 2e10))


def matmul(rows: int, inner: int, columns: int) -> Operation:
    flops = 2.0 * rows * inner * columns
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)
    return Operation("matmul", flops, moved, "bfloat16", (1, rows, inner, columns))


def test_a_large_matmul_runs_at_the_share_of_the_ceiling() -> None:
    large = matmul(65536, 8192, 8192)
    assert seconds(large, HARDWARE) == pytest.approx(large.flops / (0.9 * 2e14), rel=0.01)


def test_one_of_half_flops_reaches_half_of_it() -> None:
    work = Operation("matmul", 1e10, 0.0, "bfloat16", (1, 1, 1, 1))
    assert seconds(work, HARDWARE) == pytest.approx(2 * 1e10 / (0.9 * 2e14))


def test_a_narrow_one_is_bound_by_bytes_and_a_tiny_one_by_its_launch() -> None:
    narrow = matmul(1, 100_000, 100_000)
    assert seconds(narrow, HARDWARE) == pytest.approx(narrow.bytes / (0.8 * 2e12))
    tiny = Operation("memory", 0.0, 8.0, "bfloat16", count=7)
    assert total([tiny], HARDWARE) == pytest.approx(7e-5)
    # A host that is ahead of the device hides its launches behind what computes longer.
    assert total([tiny, narrow], HARDWARE) == pytest.approx(seconds(narrow, HARDWARE))


def test_matrices_that_pass_memory_beside_computing_make_narrow_matmuls_slower() -> None:
    passing = replace(HARDWARE, kernels=replace(HARDWARE.kernels, half_flops=0.0, matmul_passes=2.0))
    for work in (matmul(8192, 8192, 8192), matmul(8192, 1024, 1024)):
        beside = 2 * work.bytes / (0.8 * 2e12)
        assert seconds(work, passing) == pytest.approx(work.flops / (0.9 * 2e14) + beside)


def test_a_precision_that_the_device_lacks_is_named() -> None:
    with pytest.raises(UserError, match=r"made up: expected a precision .*bfloat16.*got float16"):
        seconds(replace(matmul(64, 64, 64), dtype="float16"), HARDWARE)


def test_an_operator_that_was_measured_takes_what_it_took_and_others_what_their_kind_does() -> None:
    rates = {"gelu float32": Rates(1e-6, per_byte=1e-9), "matmul float32": Rates(2e-6, 1e-11)}
    here = replace(HARDWARE, measured=rates)
    gelu = Operation("memory", 0.0, 1e6, "float32", count=3, name="gelu")
    assert seconds(gelu, here) == pytest.approx(3 * (1e-6 + 1e-3 + here.kernels.launch))
    product = Operation("matmul", 1e8, 1e6, "float32", (1, 2, 3, 4), name="addmm")
    assert seconds(product, here) == pytest.approx(2e-6 + 1e-3 + here.kernels.launch)
    other = Operation("memory", 0.0, 1e6, "bfloat16", name="gelu")
    assert seconds(other, here) == seconds(other, replace(here, measured={}))


def test_rows_that_begin_anywhere_cost_tensor_cores_most_of_their_rate() -> None:
    large = matmul(16384, 768, 50257)
    slow = seconds(replace(large, aligned=False), HARDWARE)
    assert slow == pytest.approx(seconds(large, HARDWARE) / UNALIGNED, rel=0.05)
