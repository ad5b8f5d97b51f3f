from __future__ import annotations

import pytest

from paceline.core.strategy import Strategy
from paceline.plan.buffer_table import HEADS, buffers, rows
from tests.core.broken import job


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_each_buffer_is_told_with_the_ops_that_it_is_there_for(micro_batches: int) -> None:
    plan = job(Strategy(zero=3, precision="bfloat16"))[0]
    found = buffers(plan, micro_batches)
    assert [each.name for each in found] == [each.name for each in plan.buffers(micro_batches)]
    told = {row[0]: dict(zip(HEADS, row, strict=True)) for row in rows(found)}
    assert told["unsharded slot 0"]["first written by"] == "all_gather of u0"
    assert told["master 0"]["last read by"] == "cast of optimizer"
    assert told["parameters 0"]["last read by"] == "all_gather of u0"
    assert told["parameters 0"]["size"] == "2.50 KiB"


def test_of_many_the_largest_are_shown() -> None:
    units = [f"u{index}" for index in range(20)]
    shown = rows(buffers(job(Strategy(zero=3, accumulation="hold"), units=units)[0], 1))
    assert len(shown) == 13 and shown[-1][0].endswith(" smaller")
