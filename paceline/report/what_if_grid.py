"""The programs of all settings that a page offers, as columns of numbers that its script simulates. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UserError
from paceline.core.ops import COMPUTE, PREVIOUS, STREAMS, Key, Op
from paceline.report.variants import Choices, Setting
from paceline.report.what_if import STEPS, Cost, WhatIf


def grid(what_if: WhatIf, offered: Choices) -> dict[str, Any]:
    """What the script needs.

    Programs that differ in costs alone share a shape: kinds, streams and what comes after what, and the times of the
    ops that no setting changes. Of each setting are written down its shape, the costs of the other ops, and the bytes
    that a rank sends; or why the run's other settings do not go with it.
    """
    kinds: dict[str, int] = {}
    names: dict[str, int] = {}
    shapes: dict[tuple[object, ...], int] = {}
    listed: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    for setting in _settings(offered):
        try:
            schedule = what_if.schedule(setting)
        except UserError as error:
            settings[_name(setting)] = str(error)
            continue
        ops = schedule.step(what_if.micro_batches)
        costs = what_if.costs(schedule)
        shape = tuple((op.key, op.stream, op.after) for op in ops)
        if shape not in shapes:
            shapes[shape] = len(listed)
            listed.append(_shape(ops, costs, kinds, names, what_if.micro_batches))
        changing = [costs[op.key] for op in ops if _changes(op)]
        settings[_name(setting)] = [
            shapes[shape],
            [_microseconds(cost.fixed) for cost in changing],
            [round(cost.carried) for cost in changing],
            sum(op.sent for op in ops),
        ]
    own = what_if.own
    return {
        "stages": list(offered.stages),
        "devices": list(offered.devices),
        "buckets": list(offered.bucket_mb),
        "bucketNames": [f"{size:g}" for size in offered.bucket_mb],
        "usesBuckets": [what_if.uses_buckets(stage) for stage in offered.stages],
        "own": [
            list(offered.stages).index(own.stage),
            list(offered.devices).index(own.devices),
            list(offered.bucket_mb).index(own.bucket_mb),
        ],
        "bandwidth": what_if.bandwidth if what_if.link.has_limit else None,
        "steps": STEPS,
        "kinds": list(kinds),
        "names": list(names),
        "streams": list(STREAMS),
        "shapes": listed,
        "settings": settings,
    }


def _settings(offered: Choices) -> list[Setting]:
    return [
        Setting(stage, devices, size)
        for stage in offered.stages
        for devices in offered.devices
        for size in offered.bucket_mb
    ]


def _name(setting: Setting) -> str:
    return f"{setting.stage} {setting.devices} {setting.bucket_mb:g}"


def _shape(
    ops: tuple[Op, ...], costs: Mapping[Key, Cost], kinds: dict[str, int], names: dict[str, int], micro_batches: int
) -> dict[str, Any]:
    index = {op.key: number for number, op in enumerate(ops)}

    def place(key: Key) -> int:
        """The place of an op; of one of the step before, counted from -1 down."""
        if key.micro_batch != PREVIOUS:
            return index[key]
        return -1 - index[key._replace(micro_batch=micro_batches - 1)]

    return {
        "kind": [kinds.setdefault(op.kind, len(kinds)) for op in ops],
        "name": [names.setdefault(op.target, len(names)) for op in ops],
        "stream": [STREAMS.index(op.stream) for op in ops],
        "after": [[place(key) for key in op.after] for op in ops],
        "computes": [int(op.kind in COMPUTE) for op in ops],
        "fixed": [0 if _changes(op) else _microseconds(costs[op.key].fixed) for op in ops],
        "changing": [number for number, op in enumerate(ops) if _changes(op)],
    }


def _changes(op: Op) -> bool:
    """Whether what it costs depends on more than its name."""
    return op.kind not in ("forward", "backward")


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 2)
