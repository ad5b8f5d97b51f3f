from __future__ import annotations

import sys

import pytest

from paceline.bench import subject_line as module
from paceline.bench.subject_line import progress


def told(capsys: pytest.CaptureFixture[str]) -> str:
    with progress() as report:
        for text in ("a case: one system", "a case: another", "", "another case: one system"):
            report(text)
    return capsys.readouterr().err


def test_where_there_is_no_terminal_each_subject_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == "a case\nanother case\n"


@pytest.mark.parametrize(("width", "room"), [(80, 77), (20, 17)])
def test_on_a_terminal_one_line_as_wide_as_that_says_what_is_measured_and_is_taken_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, room: int
) -> None:
    monkeypatch.setattr(module, "columns", lambda stream: width if stream is sys.stderr else None)
    texts = ["", "a case: one system", "a case: another", "", "another case: one system", ""]
    assert told(capsys).split("\r\033[K") == [text[:room] for text in texts]
