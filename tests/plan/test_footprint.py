from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.build_layout import build_layout
from paceline.core.layout import ROOT
from paceline.core.memory import memory
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.plan.footprint import footprint, moments
from paceline.plan.work import UnitWork, Work
from tests.drawn import spec

NUMEL = 4 * 64
UNITS = ("embed", "blocks.0", "blocks.1", "head")
WORK = Work(
    units=(
        UnitWork("embed", (), (), kept=10, kept_input=10),
        UnitWork("blocks.0", (), (), kept=1000, kept_input=100, kept_attention=300, forward_peak=50, backward_peak=70),
        UnitWork("blocks.1", (), (), kept=1000, kept_input=100, kept_attention=300, forward_peak=50, backward_peak=70),
        UnitWork("head", (), (), kept=600, kept_input=600, forward_peak=0, backward_peak=5, logits=500),
    ),
    samples=1,
    tokens=8,
)
BYTES = NUMEL * 4


def schedule(strategy: Strategy, ranks: int, tied: bool = False) -> Schedule:
    specs = [spec(f"{unit}.w", NUMEL, unit) for unit in UNITS] + ([spec("tied", NUMEL, ROOT)] if tied else [])
    return Schedule(build_layout(specs, (ROOT, *UNITS), strategy, ranks), strategy, ranks, 0, UNITS)


def test_one_process_is_fullest_where_activations_and_gradients_together_are() -> None:
    # Backward of the head has 2,615 and one gradient of 1,024 bytes; of blocks.1 2,080 and two, of blocks.0 1,080 and
    # three, of embed 10 and four.
    found = footprint(WORK, schedule(Strategy(), 1))
    assert found.moment == "backward of blocks.0" and found.gradients == 3 * BYTES and found.activations == 1080
    assert found.steady == 3 * 4 * BYTES, "parameters and two states"
    assert found.peak == found.steady + found.gradients + found.activations


def test_gradients_that_are_copied_lie_between_autograd_and_bucket_one_unit_at_a_time() -> None:
    plan = schedule(Strategy(), 2)
    found = footprint(WORK, plan)
    assert found.moment == "backward of head" and found.logits == 500
    assert found.activations == 10 + 2000 + 100 + 5
    assert found.gradients == 4 * BYTES + BYTES and found.steady == memory(plan).total


@pytest.mark.parametrize(("how", "kept"), [("unit", 100), ("keep_attention", 300)])
def test_what_is_recomputed_is_there_for_its_own_backward_alone(how, kept: int) -> None:
    found = {each.name: each for each in moments(WORK, schedule(Strategy(recompute=how), 2))}
    assert found["backward of head"].activations == 10 + 2 * kept + 100 + 5
    assert found["backward of blocks.1"].activations == 10 + kept + 1000 + 70
    assert found["backward of blocks.0"].activations == 10 + 1000 + 70


def test_a_tied_gradient_stays_from_the_head_to_the_end_and_meets_the_embedding_s() -> None:
    found = {each.name: each for each in moments(WORK, schedule(Strategy(), 2, tied=True))}
    assert found["backward of head"].gradients == 2 * BYTES
    assert found["backward of blocks.0"].gradients == 2 * BYTES
    assert found["backward of embed"].gradients == 4 * BYTES, "both shares, their sum and the unit's own"


def test_logits_are_of_the_unit_that_keeps_them_and_count_what_the_loss_makes_of_them() -> None:
    head = replace(WORK.units[-1], forward_peak=900)
    work = replace(WORK, units=(*WORK.units[:-1], head, UnitWork("", (), (), kept=0, kept_input=0)))
    found = {each.name: each for each in moments(work, schedule(Strategy(), 2))}
    assert found["forward of head"][1:] == (10 + 2000 + 100, 500 + 900, 0)
    assert found["backward of head"][1:] == (10 + 2000 + 100 + 5, 500, BYTES)
    assert found["backward of the model"].logits == 500 and found["backward of blocks.1"].logits == 0


def test_a_loss_beside_the_units_keeps_logits_of_its_own() -> None:
    work = replace(WORK, units=(*WORK.units, UnitWork("", (), (), kept=800, kept_input=800, logits=700)))
    found = {each.name: each for each in moments(work, schedule(Strategy(), 2))}
    assert found["backward of the model"][1:3] == (10 + 2000 + 100 + 100, 500 + 700)
    assert found["backward of head"].logits == 500


def test_logits_that_are_recomputed_are_there_for_their_own_backward_alone() -> None:
    block = replace(WORK.units[1], logits=400)
    work = replace(WORK, units=(WORK.units[0], block, *WORK.units[2:]))
    found = {each.name: each for each in moments(work, schedule(Strategy(recompute="unit"), 2))}
    assert found["forward of blocks.1"].logits == 0 and found["backward of blocks.0"].logits == 400


def test_gradients_that_come_while_activations_go_are_counted_once() -> None:
    head = replace(WORK.units[-1], backward_whole=BYTES + 2)
    known = replace(WORK, units=(*WORK.units[:-1], head))
    found = next(each for each in moments(known, schedule(Strategy(), 2)) if each.name == "backward of head")
    assert found.total == 10 + 2000 + 600 + BYTES + 2 and found.gradients == BYTES


def test_copies_after_backward_leave_all_of_autograd_s_gradients_until_then() -> None:
    found = {each.name: each for each in moments(WORK, schedule(Strategy(synchronize="after"), 2))}
    assert [found[f"backward of {unit}"].gradients for unit in reversed(UNITS)] == [BYTES * n for n in (1, 2, 3, 4)]


def test_later_micro_batches_add_one_gradient_at_a_time_to_what_is_there() -> None:
    walked = list(moments(WORK, schedule(Strategy(), 1), micro_batches=5))
    second = walked[len(walked) // 2 :]
    assert [each.gradients for each in second if each.name.startswith("backward")] == [5 * BYTES] * 4


def test_gradients_kept_as_computed_are_copied_for_the_update() -> None:
    low = schedule(Strategy(zero=2, precision="bfloat16", reduce_in_float32=False), 2)
    wide = schedule(Strategy(zero=2, precision="bfloat16"), 2)
    assert next(each for each in moments(WORK, low) if each.name == "update").gradients == 4 * BYTES // 2
    assert next(each for each in moments(WORK, wide) if each.name == "update").gradients == 0
