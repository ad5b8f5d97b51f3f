from __future__ import annotations

from fractions import Fraction

import pytest
from torch import nn

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.plan.models import meta_model
from paceline.plan.stages import Row, Shapes, row, shapes, strategies


@pytest.fixture(scope="module")
def llama() -> Shapes:
    return shapes(meta_model("llama-70b"))


def test_the_stages_and_the_hybrid() -> None:
    assert [each.stage for each in strategies(0, "bfloat16")] == [0, 1, 2, 3]
    hybrid = strategies(4, "float16")[-1]
    assert (hybrid.stage, hybrid.shard, hybrid.precision) == (3, 4, "float16")


@pytest.mark.parametrize("devices", [1, 8, 1024])
def test_70_billion_parameters_at_each_stage(llama: Shapes, devices: int) -> None:
    parameters = llama.numel
    assert parameters == pytest.approx(70.55e9, rel=1e-3)
    rows = [row(llama, strategy, devices) for strategy in strategies(0, "bfloat16")]
    share = Fraction(devices - 1, devices)
    for each, held, sent in zip(
        rows,
        # bfloat16 parameters, fp32 gradients, fp32 master and Adam's two states: 2 + 4 + 12 bytes.
        (18, 6 + Fraction(12, devices), 2 + Fraction(16, devices), Fraction(18, devices)),
        # fp32 gradients reduced, bfloat16 parameters gathered.
        (2 * 4, 4 + 2, 4 + 2, 4 + 2 * 2),
        strict=True,
    ):
        padded = parameters + each.padding // 2
        assert each.memory.states == held * padded
        assert 0 <= each.padding / 2 < parameters / 1000
        if each.strategy.stage < 3:
            assert sum(each.sent.values()) == sent * share * padded
        else:
            # Less than in theory: two units stay gathered from forward to backward.
            assert sum(each.sent.values()) == pytest.approx(float(sent * share * padded), rel=0.02)
            assert sum(each.sent.values()) <= sent * share * padded


def test_groups_hold_more_and_send_less_far(llama: Shapes) -> None:
    whole = row(llama, Strategy(zero=3, precision="bfloat16"), 64)
    groups = row(llama, Strategy(zero=3, shard=8, precision="bfloat16"), 64)
    assert groups.memory.states == pytest.approx(8 * whole.memory.states, rel=1e-3)
    assert groups.sent["all_reduce"] == pytest.approx(2 * 7 / 8 * 4 * llama.numel / 8, rel=1e-3)
    assert whole.sent["all_reduce"] == 0


def test_micro_batches_multiply_what_stage_2_reduces_and_not_what_stage_1_does(llama: Shapes) -> None:
    def reduced(zero: int, micro_batches: int) -> int:
        return row(llama, Strategy(zero=zero), 8, micro_batches).sent["reduce_scatter"]

    assert reduced(2, 4) == 4 * reduced(2, 1)
    assert reduced(1, 4) == reduced(1, 1)


def test_shared_parameters_count_once_and_stay_gathered() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    model[7].weight = model[0].weight
    tied = shapes(model)
    assert tied.numel == 7 * 64 * 64
    each = row(tied, Strategy(zero=3), 4)
    # Two of the others at a time, and the shared one.
    assert each.memory.gathered == 3 * 64 * 64 * 4


def test_a_row_as_json_is_its_bytes(llama: Shapes) -> None:
    each: Row = row(llama, Strategy(zero=2, shard=4), 8)
    values = each.to_dict()
    assert (values["zero"], values["shard"]) == (2, 4)
    assert values["memory"]["total"] == each.memory.total == sum(values["memory"].values()) - each.memory.total
    assert values["sent"]["total"] == sum(each.sent.values())
    assert each.name == "zero 2, groups of 4"


def test_groups_that_do_not_divide_the_devices_are_refused(llama: Shapes) -> None:
    with pytest.raises(UserError, match="8 ranks cannot form groups of 3"):
        row(llama, strategies(3, "bfloat16")[-1], 8)


def test_a_communicator_for_each_kind_of_group_and_none_alone(llama: Shapes) -> None:
    assert [row(llama, strategy, 8).communicators for strategy in strategies(4, "bfloat16")] == [2, 3, 3, 3, 4]
    assert row(llama, Strategy(zero=3), 1).communicators == 0
