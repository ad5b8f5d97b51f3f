"""What a step would take with other settings is what it does take where the costs are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core.errors import UserError
from paceline.core.ops import COMPUTE, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.report.link import Link, fitted_link
from paceline.report.meetings import groups_of
from paceline.report.prediction import Prediction
from paceline.report.program import Program
from paceline.report.steps import Step
from paceline.report.variants import STAGES, Setting, choices, variant
from paceline.report.what_if import STEPS, WhatIf, last_step
from paceline.report.what_if_grid import grid
from tests.report.events import recording
from tests.report.test_prediction import program

LINK = Link(latency=0.02, bandwidth=2e4, samples=0, typical_miss=0.0, worst_miss=0.0)
"""On which a bucket of 4 KiB takes a quarter of a second."""


def costs(schedule: Schedule, bandwidth: float = LINK.bandwidth) -> Callable[[Op], float]:
    """Of a machine over this link: what touches elements takes a time for each, collectives what the link says."""
    link = replace(LINK, bandwidth=bandwidth)

    def seconds(op: Op) -> float:
        if op.kind not in COMPUTE:
            return link.seconds(op.kind, schedule.position_in(op.group)[1], op.bytes)
        elements = sum(span.stop - span.start for span in op.writes)
        return {"forward": 0.1, "backward": 0.2, "statistics": 0.001}.get(op.kind, 1e-5 * elements)

    return seconds


def ran(known: Program) -> Step:
    """A step of all ranks of a program on that machine."""
    events = []
    for rank in range(known.schedule.world_size):
        schedule = replace(known.schedule, rank=rank)
        done = simulate(schedule, costs(schedule), known.micro_batches, STEPS)
        events += [event for event in done if event.step == STEPS - 1]
    strategy, ranks = known.schedule.strategy, known.schedule.world_size
    return Step(recording(events), groups_of(strategy, ranks))


def asked(known: Program) -> WhatIf:
    step = ran(known)
    link = fitted_link([step])
    assert link is not None
    assert (link.latency, link.bandwidth) == (pytest.approx(LINK.latency), pytest.approx(LINK.bandwidth))
    return WhatIf(known, Prediction(known, step), link)


@pytest.mark.parametrize(
    "zero", [0, 2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.full)])
def test_other_settings_take_what_they_would_take(zero: int, micro_batches: int) -> None:
    known = program(Strategy(zero=zero, bucket_mb=0.004), micro_batches)
    found = asked(known)
    for stage in STAGES:
        for devices in (1, 2, 8):
            for size, bandwidth in ((0.004, 2e4), (0.016, 2e4), (0.004, 1e5)):
                schedule = variant(known, Setting(stage, devices, size), 0)
                truth = simulate(schedule, costs(schedule, bandwidth), micro_batches, STEPS)
                step = found.predict(Setting(stage, devices, size), bandwidth)
                assert step.seconds == pytest.approx(last_step(truth).seconds, rel=1e-6), (stage, devices, size)


def test_as_run_it_takes_what_the_timeline_predicts() -> None:
    known = program(Strategy(zero=2, bucket_mb=0.004))
    step = ran(known)
    # Ranks and collectives that do not take what any rule says.
    events = [replace(e, end=e.end + 0.01 * (i % 7)) for i, e in enumerate(step.events)]
    odd = Step(recording(events), groups_of(None, 2))
    prediction = Prediction(known, odd)
    found = WhatIf(known, prediction, LINK)
    assert found.predict(found.own).span == pytest.approx(max(prediction.seconds.values()))
    assert found.predict(found.own).seconds >= found.predict(found.own).span


def test_a_step_is_counted_from_the_end_of_the_one_before() -> None:
    known = program(Strategy(zero=1, bucket_mb=0.004))
    step = asked(known).predict(Setting(1, 2, 0.004))
    # What the update gathers is waited for before the first op.
    assert step.seconds > step.span + 0.1
    assert step.exposed > step.seconds - step.span - 1e-9


def test_a_kind_of_collective_keeps_how_much_longer_than_the_link_it_took() -> None:
    known = program(Strategy(zero=2, bucket_mb=0.004))
    step = ran(known)
    slow = [replace(e, end=e.end + e.seconds) if e.kind == "reduce_scatter" else e for e in step.events]
    found = WhatIf(known, Prediction(known, Step(recording(slow), groups_of(None, 2))), LINK)
    schedule = variant(known, Setting(2, 2, 0.016), 0)
    (one,) = (op for op in schedule.step(1) if op.kind == "reduce_scatter")
    cost = found.costs(schedule)[one.key]
    assert cost.seconds(LINK.bandwidth) == pytest.approx(2 * LINK.seconds("reduce_scatter", 2, one.bytes), rel=1e-6)


def test_what_contradicts_the_runs_other_settings_is_refused_in_words() -> None:
    known = program(Strategy(packing="flat"))
    with pytest.raises(UserError, match="gradients while backward runs"):
        variant(known, Setting(2, 2, 25.0), 0)
    drawn = grid(asked(program(Strategy(packing="parameter", synchronize="after"))), choices(known))
    assert "packing" in drawn["settings"]["3 2 25"] and isinstance(drawn["settings"]["1 2 25"], list)
    assert drawn["usesBuckets"] == [False] * 4


def test_the_runs_own_settings_are_among_the_choices_and_long_programs_have_fewer() -> None:
    short, long = (choices(program(Strategy(bucket_mb=0.003), count)) for count in (1, 400))
    for offered in (short, long):
        assert 0.003 in offered.bucket_mb and 2 in offered.devices
    assert len(short.devices) > len(long.devices) or len(short.bucket_mb) > len(long.bucket_mb)


def test_groups_of_shards_stay_where_they_fit() -> None:
    known = program(Strategy(zero=3, shard=2))
    assert variant(known, Setting(3, 8, 25.0), 0).shards == 2
    assert variant(known, Setting(0, 8, 25.0), 0).shards == 1
    assert variant(known, Setting(3, 1, 25.0), 0).shards == 1
