from __future__ import annotations

import sys

import pytest

from paceline.bench.progress import progress


def told(capsys: pytest.CaptureFixture[str]) -> str:
    with progress() as report:
        for text in ("a case: one system", "a case: another", "", "another case: one system"):
            report(text)
    return capsys.readouterr().err


def test_where_there_is_no_terminal_each_subject_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys) == "a case\nanother case\n"


def test_on_a_terminal_one_line_says_what_is_measured_and_is_taken_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lines = told(capsys).split("\r\033[K")
    assert lines == ["", "a case: one system", "a case: another", "", "another case: one system", ""]
