"""Files of events that no run wrote: each ends in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.core.events import Event
from paceline.report.trace import chrome_trace, read_events, write_trace

EVENT = Event("all_reduce", "bucket 0", 0, "backward", "reduce", 4, 4, 4, 1, 0, 1.0, 2.0).to_dict()


def line(**changes: Any) -> bytes:
    return json.dumps(EVENT | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\n", "line 1: not an event"),
        (line() + line(target="\xe9").replace(b"\\u00e9", b"\xe9"), "line 2: not an event"),
        (line(stream="elsewhere"), "expected a stream of compute, "),
        (line(stream="\x1b[31m"), r"got '\\x1b\[31m'"),
        (line(step="1"), r"Expected `int`, got `str` - at `\$.step`"),
        (line(start=None), "not an event"),
        (line(start=float("nan")), "not an event"),
        (line().replace(b'"start": 1.0', b'"start": 1e999'), "not an event"),
        (line().replace(b'"step": 1', b'"step": ' + b"9" * 5000), "not an event"),
        (b"[1, 2]\n", "not an event"),
        (b"[" * 100_000, "not an event"),
        (b'{"kind": "forward"}\n', "missing required field"),
    ],
)
def test_what_is_no_event_is_named_by_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_events(path)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_name_is_drawn_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "events.jsonl").write_bytes(line(target="$\\frac{$"))
    write_trace(tmp_path, None, tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").stat().st_size > 1000


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]))


@given(st.dictionaries(st.sampled_from(sorted(EVENT)), VALUES, max_size=3))
def test_anything_is_a_timeline_or_a_users_mistake(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.jsonl"
    path.write_bytes(line() + line(**changes))
    try:
        json.dumps(chrome_trace(read_events(path)))
    except UserError as error:
        assert "\n" not in str(error)
