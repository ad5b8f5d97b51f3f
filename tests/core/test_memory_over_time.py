from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.memory_over_time import memory_over_time
from paceline.core.simulate import simulate
from tests.core.test_simulate import ONE_BUCKET_EACH, costs, schedule
from tests.drawn import schedules


def test_activations_grow_in_forward_and_shrink_in_backward() -> None:
    """Two units of 10 and 20 bytes, 1 s forward and 2 s backward each, with 5 bytes beside each backward."""
    events = simulate(schedule(ONE_BUCKET_EACH, units=2), costs(forward=1, backward=2, update=1))
    beside = memory_over_time(events, 100, {"u0": 10, "u1": 20}, lambda event: 5 if event.kind == "backward" else 0)
    assert beside == [(0, 110), (1, 130), (2, 135), (4, 115), (6, 100)]


@given(schedules(), st.integers(1, 3))
def test_what_comes_goes(plan, micro_batches) -> None:
    events = simulate(plan, lambda op: 1 + len(op.target) % 3, micro_batches, steps=2)
    kept = {unit: 1 + index for index, unit in enumerate(plan.computed_units)}
    found = memory_over_time(events, 50, kept, lambda event: 3)
    assert found[-1][1] == 50 and min(held for _, held in found) >= 50
    assert max(held for _, held in found) >= 50 + sum(kept.values())
    assert [when for when, _ in found] == sorted({when for when, _ in found})
