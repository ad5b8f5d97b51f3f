"""Files of events that no run wrote: what is none is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.report.trace import chrome_trace, recorded_step, write_trace

EVENT = Event("all_reduce", "bucket 0", 0, "backward", "reduce", 4, 4, 4, 1, 0, 1.0, 2.0).to_dict()


def line(**changes: Any) -> bytes:
    return json.dumps(EVENT | changes).encode() + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\n",
        line(target="\xe9").replace(b"\\u00e9", b"\xe9"),
        line(stream="elsewhere"),
        line(stream="\x1b[31m"),
        line(step="1"),
        line(step=-1),
        line(start=None),
        line(start=float("nan")),
        line(end=0.5),
        line(rank=10**9),
        line().replace(b'"start": 1.0', b'"start": 1e999'),
        line().replace(b'"step": 1', b'"step": ' + b"9" * 5000),
        b"[1, 2]\n",
        b"[" * 100_000 + b"\n",
        b'{"kind": "forward"}\n',
    ],
)
def test_what_is_no_event_is_left_out_and_told_of(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(UserError, match="not what a run writes") as caught:
        recorded_step(tmp_path, None, [])
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    problems: list[str] = []
    (tmp_path / "events.jsonl").write_bytes(line() + content)
    assert len(recorded_step(tmp_path, None, problems).events) == 1
    assert len(problems) == 1


def test_a_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "events.jsonl").write_bytes(line(target="$\\frac{$"))
    write_trace(recorded_step(tmp_path, None, []), tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").stat().st_size > 1000


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]))


@pytest.mark.full
@given(st.dictionaries(st.sampled_from(sorted(EVENT)), VALUES, max_size=3))
def test_of_anything_there_is_a_timeline(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp()
    (path / "events.jsonl").write_bytes(line() + line(**changes))
    step = recorded_step(path, None, [])
    json.dumps(chrome_trace(step.events, step.groups))
