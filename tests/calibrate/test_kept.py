"""Measurements in a file: whole, or none, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from paceline.calibrate import kept
from paceline.plan import profile_file
from paceline.plan.profiles import hardware

H100 = hardware("h100")


def fail(raised: BaseException) -> Callable[[Path, object], NoReturn]:
    def write(path: Path, what: object) -> NoReturn:
        path.write_text("{")
        raise raised

    return write


def test_what_is_kept_is_taken(tmp_path: Path) -> None:
    kept.keep(tmp_path / "new" / "it.json", H100, pytest.fail)
    assert kept.taken(tmp_path / "new" / "it.json") == H100
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["it.json"]


def test_ctrl_c_amid_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.keep(tmp_path / "it.json", H100, pytest.fail)
    monkeypatch.setattr(profile_file, "write", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        kept.keep(tmp_path / "it.json", H100, pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == ["it.json"] and kept.taken(tmp_path / "it.json") == H100


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "write", fail(OSError(28, "No space left on device")))
    told: list[str] = []
    kept.keep(tmp_path / "it.json", H100, told.append)
    assert not list(tmp_path.iterdir()) and "No space left on device" in told[0] and "measures again" in told[0]
