from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.core.events import Event, exposed_in_step
from paceline.core.ops import Key


def event(step: int, phase: str, stream: str, start: float, end: float, exposed: float = 0.0) -> Event:
    return Event("kind", "target", 0, phase, stream, 0, 0, 0, step, 0, start, end, exposed)


def test_what_a_step_waits_for_counts_in_it_also_where_the_one_before_sent_it() -> None:
    listed = [
        event(3, "backward", "reduce", 0.0, 1.0, exposed=5.0),
        event(3, "update", "gather", 1.0, 4.0, exposed=1.0),
        event(4, "forward", "compute", 2.0, 6.0),
        event(4, "backward", "reduce", 6.0, 9.0, exposed=2.0),
        event(4, "update", "compute", 11.0, 12.0),
    ]
    assert exposed_in_step(listed, 4) == pytest.approx(3 / 10)
    assert exposed_in_step([replace(each, exposed=0.0) for each in listed], 4) == 0.0


def test_of_a_step_without_events_nothing_is_known() -> None:
    assert exposed_in_step([], 0) is None
    assert exposed_in_step([event(3, "forward", "compute", 0.0, 1.0)], 4) is None


@pytest.mark.parametrize(
    "after", [None, (), (Key("forward", "a", 0, "forward"), Key("update", "optimizer", -1, "update"))]
)
def test_it_survives_being_written_down(after: tuple[Key, ...] | None) -> None:
    whole = replace(event(3, "forward", "compute", 0.25, 1.5), after=after, memory=7, planned=False)
    found = Event.from_dict(json.loads(json.dumps(whole.to_dict())))
    assert found == whole and (not found.after or all(isinstance(key, Key) for key in found.after))
