from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.events import Event
from paceline.core.ops import COMPUTE, PREVIOUS, Key, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import simulate, timeline
from paceline.core.strategy import SYSTEMS, Strategy
from tests.drawn import schedules, spec

ONE_BUCKET_EACH = Strategy(bucket_mb=1024 * 4 / 2**20)


def schedule(strategy: Strategy, world_size: int = 2, units: int = 4) -> Schedule:
    names = tuple(f"u{i}" for i in range(units))
    layout = build_layout([spec(f"{name}.w", 1024, name) for name in names], names, strategy, world_size)
    return build_schedule(layout, strategy, world_size, 0, names)


def costs(**seconds: float):
    """By kind; what is not named takes no time."""
    return lambda op: seconds.get("agree" if op.stream == "statistics" else op.kind, 0.0)


def spans(events: list[Event], *kinds: str, step: int = 0) -> dict[str, tuple[float, float]]:
    return {e.target: (e.start, e.end) for e in events if e.kind in kinds and e.step == step}


def finish(events: list[Event]) -> float:
    return max(event.end for event in events)


# ---- worked by hand


def test_reductions_run_beside_backward_and_the_update_waits_for_the_last() -> None:
    events = simulate(
        schedule(ONE_BUCKET_EACH), costs(forward=1, backward=2, all_reduce=3, agree=0.5, update=1), micro_batches=1
    )
    assert spans(events, "backward") == {"u3": (4, 6), "u2": (6, 8), "u1": (8, 10), "u0": (10, 12)}
    assert spans(events, "all_reduce") == {
        "bucket 0": (6, 9),
        "bucket 1": (9, 12),
        "bucket 2": (12, 15),
        "bucket 3": (15, 18),
        "statistics": (12, 12.5),
    }
    assert spans(events, "update") == {"optimizer": (18, 19)}
    assert {e.target: e.exposed for e in events if e.exposed} == {"bucket 2": 3, "bucket 3": 3}


def test_after_backward_all_communication_is_exposed() -> None:
    strategy = replace(ONE_BUCKET_EACH, synchronize="after")
    events = simulate(schedule(strategy), costs(forward=1, backward=2, all_reduce=3, update=1))
    assert finish(events) == 4 * 1 + 4 * 2 + 4 * 3 + 1
    assert sum(event.exposed for event in events) == 12


def test_fast_communication_leaves_only_the_last_bucket_exposed() -> None:
    events = simulate(schedule(ONE_BUCKET_EACH), costs(forward=1, backward=2, all_reduce=0.25, update=1))
    assert finish(events) == 4 + 8 + 0.25 + 1
    assert {e.target: e.exposed for e in events if e.exposed} == {"bucket 3": 0.25}


def test_slow_communication_makes_the_step_as_long_as_itself() -> None:
    events = simulate(schedule(ONE_BUCKET_EACH), costs(forward=1, backward=2, all_reduce=100, update=1))
    assert finish(events) == 4 + 2 + 4 * 100 + 1, "the first forward and backward, all reductions, the update"
    gathers = simulate(schedule(Strategy(zero=3), units=5), costs(forward=1, backward=1, all_gather=100))
    assert finish(gathers) == (5 + 3) * 100 + 1 + 1 + 1, "after the last gather: backward of the last three units"


def test_units_are_gathered_one_ahead() -> None:
    events = simulate(schedule(Strategy(zero=3), units=5), costs(forward=2, backward=4, all_gather=1, reduce_scatter=3))
    gathers = [(e.target, e.start, e.end) for e in events if e.kind == "all_gather"]
    assert gathers == [
        *(("u0", 0, 1), ("u1", 1, 2)),
        # Into the slot of a unit that has been computed: u0 at 3, u1 at 5, u2 at 7.
        *(("u2", 3, 4), ("u3", 5, 6), ("u4", 7, 8)),
        # u4 and u3 are still there. Backward begins at 11.
        *(("u2", 15, 16), ("u1", 19, 20), ("u0", 23, 24)),
    ]
    assert spans(events, "forward")["u4"] == (9, 11)
    assert spans(events, "backward")["u0"] == (27, 31)
    assert spans(events, "reduce_scatter")["u4"] == (15, 18)
    exposed = [(event.kind, event.target, event.exposed) for event in events if event.exposed]
    assert exposed == [("all_gather", "u0", 1), ("reduce_scatter", "u0", 3)]


def test_a_slot_of_gradients_makes_backward_wait_when_reductions_are_slow() -> None:
    events = simulate(schedule(Strategy(zero=3)), costs(backward=1, reduce_scatter=10))
    assert spans(events, "reduce_scatter") == {"u3": (1, 11), "u2": (11, 21), "u1": (21, 31), "u0": (31, 41)}
    # u1 and u0 are copied in where u3 and u2 were.
    assert spans(events, "copy_in") == {"u3": (1, 1), "u2": (2, 2), "u1": (11, 11), "u0": (21, 21)}
    assert spans(events, "backward")["u0"] == (11, 12)


def test_what_the_update_sends_is_hidden_behind_the_next_forward() -> None:
    strategy = replace(ONE_BUCKET_EACH, zero=1)
    events = simulate(schedule(strategy), costs(forward=2, backward=1, all_gather=1, update=1), steps=2)
    assert spans(events, "update") == {"optimizer": (12, 13)}
    assert spans(events, "all_gather") == {f"bucket {3 - i}": (13 + i, 14 + i) for i in range(4)}
    assert spans(events, "forward", step=1) == {f"u{i}": (14 + 2 * i, 16 + 2 * i) for i in range(4)}
    assert {e.target: e.exposed for e in events if e.exposed} == {"bucket 3": 1}, "only the first unit's gather"
    assert [event.step for event in events] == sorted(event.step for event in events)


def test_the_next_step_gathers_only_after_the_update() -> None:
    events = simulate(schedule(Strategy(zero=3)), costs(forward=1, backward=1, all_gather=1, update=5), steps=2)
    (first, *_) = [event for event in events if event.kind == "all_gather" and event.step == 1]
    assert first.start == spans(events, "update")["optimizer"][1]


def test_the_next_step_gathers_only_after_the_master_was_rounded() -> None:
    strategy = Strategy(zero=3, precision="bfloat16")
    events = simulate(schedule(strategy), costs(forward=1, backward=1, all_gather=1, update=5, cast=2), steps=2)
    (first, *_) = [event for event in events if event.kind == "all_gather" and event.step == 1]
    assert first.start == spans(events, "cast")["optimizer"][1]


def test_what_has_no_cost_takes_no_time() -> None:
    events = simulate(schedule(Strategy(zero=3)), costs(forward=1, backward=1), steps=2)
    assert finish(events) == 2 * 8
    assert {event.kind for event in events if event.seconds} == {"forward", "backward"}


def test_workers_wait_for_the_weights_of_the_parameter_server() -> None:
    strategy = SYSTEMS["parameter server"]
    events = simulate(schedule(strategy), costs(forward=1, backward=1, reduce=3, update=1, broadcast=2), steps=2)
    assert spans(events, "broadcast") == {"bucket 0": (12, 14)}
    assert spans(events, "forward", step=1)["u0"] == (14, 15)
    assert {e.kind: e.exposed for e in events if e.exposed and e.step == 0} == {"reduce": 3, "broadcast": 2}


def test_accumulation_saves_the_reductions_of_all_but_the_last_micro_batch() -> None:
    seconds = costs(forward=1, backward=1, all_reduce=10)
    deferred = simulate(schedule(ONE_BUCKET_EACH), seconds, micro_batches=3)
    each = simulate(schedule(replace(ONE_BUCKET_EACH, accumulation="each")), seconds, micro_batches=3)
    assert (finish(deferred), finish(each)) == (2 * 8 + 4 + 1 + 40, 4 + 1 + 3 * 40)


def test_computing_is_slower_beside_communication() -> None:
    """Backward of u2 begins with the reduction of 3 s: 1.5 times as slow, 2 s of it take 3, as of u1."""
    seconds = costs(forward=1, backward=2, all_reduce=3, update=1)
    events = simulate(schedule(ONE_BUCKET_EACH), seconds, contention=0.5)
    assert spans(events, "backward") == {"u3": (4, 6), "u2": (6, 9), "u1": (9, 12), "u0": (12, 15)}
    assert finish(events) == 18 + 1, "the last reduction, and the update beside nothing"


def test_only_what_runs_beside_communication_is_slower() -> None:
    """A reduction of 1 s beside 2 s of computing: 1 s does two thirds of a second's work, the rest runs alone."""
    events = simulate(schedule(ONE_BUCKET_EACH), costs(backward=2, all_reduce=1), contention=0.5)
    starts, ends = zip(*spans(events, "backward").values(), strict=True)
    assert [end - start for start, end in zip(starts, ends, strict=True)] == pytest.approx(
        [2, 2 + 1 / 3] + [2 + 1 / 3] * 2
    )


@given(schedules(), st.integers(1, 2), st.floats(0, 2))
def test_contention_makes_no_step_shorter_and_none_longer_than_all_of_it(plan, micro_batches, contention) -> None:
    def lasts(contention: float) -> float:
        return finish(simulate(plan, lambda op: 1 + len(op.target) % 3, micro_batches, 2, contention))

    assert lasts(0) - 1e-9 <= lasts(contention) <= (1 + contention) * lasts(0) + 1e-9


def test_a_step_among_many_is_the_last_of_some() -> None:
    plan = schedule(replace(ONE_BUCKET_EACH, zero=1))
    line = timeline(plan.step(1), costs(forward=2, backward=1, all_gather=1, update=1), 1, steps=3)
    assert line.steps == 3
    assert line.computed(0) == 13, "nothing to wait for in the first"
    assert line.last_step == 14, "the first unit's gather is waited for"


# ---- what holds of every schedule


@given(schedules(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_every_op_starts_as_early_as_its_stream_and_its_dependencies_allow(plan, micro_batches, steps, data) -> None:
    ops = plan.step(micro_batches)
    seconds = {op.key: data.draw(st.integers(0, 5)) for op in ops[:40]}
    events = simulate(plan, lambda op: seconds.get(op.key, 2), micro_batches, steps)
    assert len(events) == steps * len(ops)
    ends: dict[tuple[int, Key], float] = {}
    free: dict[str, float] = defaultdict(float)
    computed = 0.0
    for index, event in enumerate(events):
        op, step = ops[index % len(ops)], index // len(ops)
        assert (event.kind, event.target, event.micro_batch, event.phase) == op.key
        assert (event.stream, event.bytes, event.sent, event.received) == (op.stream, op.bytes, op.sent, op.received)
        assert (event.step, event.rank) == (step, plan.rank)
        if index % len(ops) == 0:
            computed = free["compute"]
        earliest = [free[op.stream], computed]
        for key in op.after:
            if key.micro_batch != PREVIOUS:
                earliest.append(ends[step, key])
            elif step:
                earliest.append(ends[step - 1, key._replace(micro_batch=micro_batches - 1)])
        assert event.start == max(earliest)
        assert event.end == event.start + seconds.get(op.key, 2)
        ends[step, op.key] = free[op.stream] = event.end


@given(schedules(), st.integers(1, 3), st.integers(1, 3))
def test_exposed_time_is_when_computing_stands_still(plan: Schedule, micro_batches: int, steps: int) -> None:
    events = simulate(plan, lambda op: 1 + len(op.target) % 3, micro_batches, steps)
    computing = [event for event in events if event.kind in COMPUTE]
    idle = max(event.end for event in computing) - sum(event.seconds for event in computing)
    assert sum(event.exposed for event in events) == idle
    assert all(0 <= event.exposed <= event.end for event in events)
    assert not any(event.exposed for event in computing)


def test_a_schedule_that_names_an_op_it_does_not_have_is_an_error() -> None:
    class Broken(Schedule):
        def step(self, micro_batches: int) -> tuple[Op, ...]:
            return (Op("update", "optimizer", 0, "update", "compute", (Key("all_reduce", "bucket 9", 0, "backward"),)),)

    plan = schedule(Strategy())
    with pytest.raises(ValueError, match="bucket 9"):
        simulate(Broken(plan.layout, plan.strategy, 2, 0, plan.order), lambda op: 1.0)
