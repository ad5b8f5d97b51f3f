from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core.ops import COMPUTE, Op
from paceline.core.simulate import simulate
from paceline.core.strategy import Strategy
from paceline.report.meetings import groups_of
from paceline.report.prediction import Prediction
from paceline.report.program import Program
from paceline.report.steps import Step
from tests.core.test_simulate import schedule
from tests.report.events import recording

SLOW_LINK = {
    "forward": 1.0,
    "backward": 2.0,
    "update": 1.0,
    "all_reduce": 3.0,
    "reduce_scatter": 3.0,
    "all_gather": 2.0,
}


def program(strategy: Strategy, micro_batches: int = 1) -> Program:
    known = schedule(strategy)
    return Program(known, micro_batches, tuple(slot.spec for slot in known.layout.slots))


def executed(known: Program, costs: Callable[[Op], float], slower: float = 1.0, later: bool = False) -> Step:
    """The third step of two ranks, of which the second takes so many times as long to compute; collectives at once."""
    events = []
    for rank in (0, 1):
        factor = slower if rank else 1.0
        ran = simulate(
            replace(known.schedule, rank=rank),
            lambda op, factor=factor: costs(op) * (factor if op.kind in COMPUTE else 1.0),
            known.micro_batches,
            3,
        )
        under_way = [e for e in ran if later and e.phase == "update" and e.stream != "compute"]
        events += [event for event in ran if event.step == 2 and event not in under_way]
    return Step(recording(events), groups_of(None, 2))


@pytest.mark.parametrize(("zero", "micro_batches"), [(0, 1), (0, 2), (3, 2)])
def test_ops_that_take_what_they_took_give_the_step_that_was(zero: int, micro_batches: int) -> None:
    known = program(Strategy(zero=zero, bucket_mb=0.004), micro_batches)
    step = executed(known, lambda op: SLOW_LINK.get(op.kind, 0.0))
    found = Prediction(known, step)
    assert found.seconds == {rank: pytest.approx(step.seconds) for rank in (0, 1)}
    was = {(e.kind, e.target, e.micro_batch, e.phase): e.seconds for e in step.events if e.rank == 0}
    assert {(e.kind, e.target, e.micro_batch, e.phase): e.seconds for e in found.events(0)} == pytest.approx(was)


def test_what_communication_costs_is_what_it_would_save() -> None:
    known = program(Strategy(synchronize="after", bucket_mb=0.004))
    step = executed(known, lambda op: SLOW_LINK.get(op.kind, 0.0))
    # 4 units of 1 and 2 seconds, an update of 1; 4 buckets of 3 seconds and the statistics of 3 follow backward.
    (first, *_) = Prediction(known, step).changes(waits=0.0)
    assert first.what == "collectives took no time"
    assert first.gain == pytest.approx(1 - 13 / step.seconds)


def test_what_a_slow_rank_costs_is_weighed_against_the_rest() -> None:
    known = program(Strategy())
    found = Prediction(known, executed(known, lambda op: 1.0 if op.kind in COMPUTE else 0.01, slower=2.0))
    assert found.seconds[1] == pytest.approx(2 * found.seconds[0], rel=0.02)
    (first, *_) = found.changes(waits=0.4)
    assert (first.what, first.gain) == ("no rank were slower than the others", 0.4)
    assert "slower" not in "".join(change.what for change in found.changes(waits=0.0))


def test_pauses_are_what_the_schedule_does_not_have() -> None:
    known = program(Strategy())
    events = executed(known, lambda op: 1.0 if op.kind in COMPUTE else 0.0).events
    stretched = [replace(e, start=2 * e.start, end=2 * e.start + e.seconds) for e in events]
    step = Step(recording(stretched), groups_of(None, 2))
    (first, *_) = Prediction(known, step).changes(waits=0.0)
    assert first.what == "nothing happened between ops"
    assert first.gain == pytest.approx(1 - Prediction(known, step).seconds[0] / step.ranks[0].seconds)


def test_what_is_still_under_way_takes_as_long_for_each_byte_as_the_others() -> None:
    known = program(Strategy(zero=2, bucket_mb=0.004))
    step = executed(known, lambda op: op.bytes / 1000 if op.kind not in COMPUTE else 1.0, later=True)
    gathers = [event for event in Prediction(known, step).events(0) if event.kind == "all_gather"]
    assert gathers and all(event.seconds == pytest.approx(event.bytes / 1000) for event in gathers)


def test_a_program_suits_what_it_was_executed_as_and_nothing_else() -> None:
    known = program(Strategy(zero=2, bucket_mb=0.004))
    step = executed(known, lambda op: 1.0)
    assert known.suits(step.recording)
    assert known.suits(executed(known, lambda op: 1.0, later=True).recording)
    events = step.recording.events
    assert not known.suits(recording(events[1:4]))
    # A run that was cut off while its second rank's events were written.
    assert not known.suits(recording(events[:-6]))
    assert not known.suits(recording([*events, replace(events[0], target="another")]))
    assert known.suits(recording([*events, replace(events[0], target="another", planned=False)]))
    assert not program(Strategy(zero=3)).suits(step.recording)
    assert known.parameters["bucket 0"] == ("u3.w",)
