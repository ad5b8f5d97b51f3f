"""What a rank holds is among its events."""

from __future__ import annotations

import sys

import pytest
import torch

import paceline as pl
from paceline.executor import memory_meter
from paceline.executor.memory_meter import reader
from tests.ranks import RankPool


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_resident_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_meter, "_SECONDS", 0.0)
    held = reader(torch.device("cpu"))
    before = held()
    kept = torch.ones(16 << 20)
    assert held() - before > 0.9 * kept.nbytes
    assert before > 10 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ops_that_follow_at_once_do_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(memory_meter, "_resident", lambda: asked.append(1) or len(asked))
    held = reader(torch.device("cpu"))
    monkeypatch.setattr(memory_meter, "_SECONDS", 60.0)
    assert [held() for _ in range(9)] == [1] * 9


def _step_with_large_activations() -> list[pl.Event]:
    memory_meter._SECONDS, usual = 0.0, memory_meter._SECONDS
    try:
        return _recorded_step()
    finally:
        memory_meter._SECONDS = usual


def _recorded_step() -> list[pl.Event]:
    model = pl.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), pl.Strategy(units=("*",)))
    with pl.record(model) as events:
        model(torch.ones(1 << 20, 4)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    return list(events)


def test_ops_that_compute_tell_it(ranks: RankPool) -> None:
    for events in ranks(2, _step_with_large_activations):
        computed = {(event.kind, event.target): event.memory for event in events if event.stream == "compute"}
        assert all(computed.values())
        # What the first layer gives is there when the second begins.
        assert computed["backward", "1"] - computed["forward", "0"] > 0.9 * (16 << 20)
        assert all(event.memory == 0 for event in events if event.stream != "compute")
