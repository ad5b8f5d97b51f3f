from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.calibrate.rates import line, rates
from paceline.calibrate.timed_pass import Timed
from paceline.plan.hardware import Rates
from paceline.plan.work import Operation

CALLS = [(1e6, 1e4), (1e7, 1e5), (1e9, 1e6), (2e9, 5e7), (1e5, 1e3), (3e8, 4e6)]


@given(st.floats(1e-7, 1e-4), st.floats(1e-13, 1e-10), st.floats(1e-12, 1e-9))
def test_what_lies_on_a_line_gives_the_line(fixed: float, per_flop: float, per_byte: float) -> None:
    true = Rates(fixed, per_flop, per_byte)
    found = line([f for f, _ in CALLS], [b for _, b in CALLS], [true.seconds(f, b) for f, b in CALLS])
    for flops, size in CALLS:
        assert found.seconds(flops, size) == pytest.approx(true.seconds(flops, size), rel=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=6, max_size=6))
def test_no_part_of_a_line_is_negative(times: list[float]) -> None:
    found = line([f for f, _ in CALLS], [b for _, b in CALLS], times)
    assert min(found.fixed, found.per_flop, found.per_byte) >= 0
    assert found.seconds(1e8, 1e6) > 0


def test_operators_that_compute_nothing_have_no_rate_of_computing() -> None:
    found = line([0.0] * 3, [1e4, 1e5, 1e6], [2e-6, 11e-6, 101e-6])
    assert found.per_flop == 0 and found.per_byte == pytest.approx(1e-10)


def test_each_operator_has_its_line_and_each_kind_one_for_the_rest() -> None:
    calls = [
        Timed(Operation("memory", 0.0, size, "float32", name=name), size * rate)
        for name, rate in (("gelu", 2e-10), ("add", 1e-10))
        for size in (1e5, 1e6)
    ]
    found = rates(calls)
    assert set(found) == {"gelu float32", "add float32", "memory float32"}
    assert found["add float32"].per_byte < found["memory float32"].per_byte < found["gelu float32"].per_byte


def test_calls_of_one_size_take_their_time_and_tell_nothing_of_a_byte() -> None:
    """Such as those that fill a scalar: what a byte of theirs would take is not read back as a rate."""
    assert line([0.0] * 2, [4.0] * 2, [12e-6, 12e-6]) == Rates(pytest.approx(12e-6), 0.0, 0.0)
    # Two sizes are two parts.
    found = line([0.0, 0.0], [1e4, 1e6], [2e-6, 101e-6])
    assert found.per_byte == pytest.approx(1e-10) and found.fixed == pytest.approx(1e-6)
    scalar = Timed(Operation("memory", 0.0, 4.0, "float32", name="scalar_tensor"), 12e-6)
    others = [Timed(Operation("memory", 0.0, size, "float32", name="add"), size * 1e-10) for size in (1e5, 1e6)]
    assert set(rates([scalar, *others])) == {"add float32", "memory float32"}


def test_blocks_of_attention_take_a_time_of_their_own() -> None:
    shapes = [(6, 96, 96, 32), (16, 128, 128, 64), (16, 192, 192, 64), (6, 48, 48, 64), (24, 128, 128, 32)]
    calls = []
    for heads, queries, keys, width in shapes:
        flops = 2.0 * heads * queries * keys * width
        each = Operation("attention", flops, 8.0 * heads * queries * width, "bfloat16", (heads, queries, keys, width))
        calls.append(Timed(each, 1e-5 + 4e-5 * each.blocks + 1e-11 * flops))
    found = rates(calls)["attention bfloat16"]
    assert found.per_block == pytest.approx(4e-5) and found.per_flop == pytest.approx(1e-11)
    # 16 heads of 4 blocks, of 3 of 64 queries; 6 heads of 2 blocks.
    assert [each.operation.blocks for each in calls[1:4]] == [64, 48, 12]
