from __future__ import annotations

import contextlib
import gc
import sys

import pytest

from paceline.launch.imports import kept_for_good


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether memory was collected, at each time when what there is was kept for good."""
    times: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(gc.isenabled()))
    return times


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_not_collected_amid_imports(monkeypatch: pytest.MonkeyPatch, frozen: list[bool], fails: bool) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with contextlib.suppress(ImportError), kept_for_good():
        assert not gc.isenabled()
        if fails:
            raise ImportError
    assert frozen == [False] and gc.isenabled()


def test_what_a_process_has_made_since_may_be_garbage(frozen: list[bool]) -> None:
    with kept_for_good():
        assert gc.isenabled()
    assert frozen == []
