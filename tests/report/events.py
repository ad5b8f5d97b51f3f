"""Events made by hand, whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.core.events import Event
from paceline.report.meetings import groups_of
from paceline.report.recordings import Place, Recording
from paceline.report.steps import Step


def compute(kind: str, rank: int, start: float, end: float, target: str = "a", **more: Any) -> Event:
    phase = kind if kind in ("forward", "backward") else "update"
    step = more.pop("step", 0)
    return Event(kind, target, 0, phase, "compute", 0, 0, 0, step, rank, start, end, **more)


def collective(rank: int, start: float, end: float, exposed: float = 0.0, **more: Any) -> Event:
    values: dict[str, Any] = {
        "kind": "all_reduce",
        "target": "0",
        "micro_batch": 0,
        "phase": "backward",
        "stream": "reduce",
        "bytes": 1000,
        "sent": 1000,
        "received": 1000,
        "step": 0,
    }
    return Event(**(values | more), rank=rank, start=start, end=end, exposed=exposed)


SLOW = [
    compute("forward", 0, 0, 1),
    compute("backward", 0, 1, 3),
    collective(0, 3, 6, exposed=3),
    compute("update", 0, 6, 7),
    compute("forward", 1, 0, 1),
    compute("backward", 1, 1, 5),
    collective(1, 5, 6, exposed=1),
    compute("update", 1, 6, 7.5),
]
"""Rank 1 takes two seconds longer for its backward, and rank 0 waits for it."""


def recording(events: Iterable[Event]) -> Recording:
    listed = tuple(events)
    place = Place(listed[0].step if listed else 0, 0, 0)
    place.events.update(event.rank for event in listed)
    return Recording(place, listed)


def step(events: Iterable[Event], world_size: int = 2) -> Step:
    return Step(recording(events), groups_of(None, world_size))


def lines(values: Iterable[Any]) -> str:
    return "".join(f"{json.dumps(each.to_dict() if isinstance(each, Event) else each)}\n" for each in values)


def figures(step: int, time: float, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, with `group__name` for group/name."""
    named = {key.replace("__", "/"): value for key, value in more.items()}
    known = {"train/loss": 2.0, "perf/step_seconds": seconds, "perf/tokens_per_second": 100.0 / seconds}
    return {"step": step, "time": time, **known, **named}


def write_run(
    folder: Path, events: Iterable[Any] = (), metrics: Iterable[Any] = (), config: str = "steps: 100\n", ranks: int = 2
) -> Path:
    """A run's folder with these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"ranks": ranks, "ranks_per_host": ranks, "host": "here"}))
    (folder / "events.jsonl").write_text(lines(events))
    (folder / "metrics.jsonl").write_text(lines(metrics))
    return folder
