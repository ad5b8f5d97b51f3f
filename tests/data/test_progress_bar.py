from __future__ import annotations

import sys

import pytest

from paceline.data import progress_bar as module
from paceline.data.progress_bar import progress, size_text


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(module, "REDRAW_SECONDS", 0.0)


@pytest.mark.usefixtures("eager")
def test_lines_tell_how_far_the_work_is() -> None:
    lines: list[str] = []
    with progress("reading", 4000, lines.append) as advance:
        advance(1000)
        advance(3000)
    assert lines[0].startswith("reading: 1.0 kB of 4.0 kB (25 %), ")
    assert lines[1] == "reading: 4.0 kB of 4.0 kB (100 %), 0 s left"


@pytest.mark.usefixtures("eager")
def test_lines_without_a_total_tell_what_is_done() -> None:
    lines: list[str] = []
    with progress("reading", None, lines.append) as advance:
        advance(1000)
    assert lines == ["reading: 1.0 kB"]


def test_short_work_prints_nothing() -> None:
    lines: list[str] = []
    with progress("reading", 10, lines.append) as advance:
        advance(10)
    assert lines == []


@pytest.mark.usefixtures("eager")
def test_terminal_gets_a_bar_instead_of_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lines: list[str] = []
    with progress("reading", 4000, lines.append) as advance:
        advance(1000)
    captured = capsys.readouterr()
    assert lines == [] and captured.out == ""
    assert "reading" in captured.err and "1.0/4.0 kB" in captured.err


@pytest.mark.usefixtures("eager")
def test_terminal_without_rich_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    lines: list[str] = []
    with progress("reading", 4000, lines.append) as advance:
        advance(4000)
    assert len(lines) == 1


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", 4000, None) as advance:
        advance(4000)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (12_100_000, "12.1 MB"), (50e9, "50.0 GB"), (3e15, "3000.0 TB")],
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert size_text(count) == text
