"""Schedules of small jobs, and ways to change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from paceline.core.build_layout import build_layout
from paceline.core.check import Report, all_ranks
from paceline.core.check.checker import check_steps
from paceline.core.ops import PREVIOUS, Key, Op
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from tests.drawn import spec
from tests.quick import examples

UNITS = tuple(f"u{i}" for i in range(5))
patient = settings(max_examples=examples(120), suppress_health_check=list(HealthCheck), deadline=None)
several = st.sampled_from([2, 3, 4, 4, 6])

Steps = list[tuple[Op, ...]]


def job(strategy: Strategy, world_size: int = 4, units: Sequence[str] = UNITS, numel: int = 1024) -> list[Schedule]:
    layout = build_layout([spec(f"{unit}.w", numel, unit) for unit in units], units, strategy, world_size)
    return all_ranks(layout, strategy, world_size, units)


BUCKETS = {"bucket_mb": 1024 * 4 / 2**20}
"""One unit each."""

RIGHT: dict[str, Strategy] = {
    **SYSTEMS,
    **{f"zero {zero}": Strategy(zero=zero, **BUCKETS) for zero in (0, 1, 2, 3)},
    "bfloat16": Strategy(zero=1, precision="bfloat16", reduce_in_float32=False),
    "reduced in bfloat16": Strategy(zero=2, precision="bfloat16", reduce_in_float32=False),
    "zero 3 in bfloat16": Strategy(zero=3, precision="bfloat16"),
    "hybrid": Strategy(zero=2, shard=2, **BUCKETS),
    "hybrid zero 3": Strategy(zero=3, shard=2),
    "hold": Strategy(zero=3, accumulation="hold"),
    "shared": Strategy(zero=2, share_parameters=True, **BUCKETS),
    "shared in bfloat16": Strategy(zero=2, share_parameters=True, precision="bfloat16", **BUCKETS),
    "sum": Strategy(gradients="sum", **BUCKETS),
}


def broken(ranks: Sequence[Schedule], change: Callable[[int, list[Op]], list[Op]], micro_batches: int = 1) -> Report:
    """The check of schedules after each rank's list of ops was changed."""
    steps = [tuple(change(rank, list(schedule.step(micro_batches)))) for rank, schedule in enumerate(ranks)]
    return check_steps(ranks, steps, micro_batches)


def without(ops: list[Op], *keys: Key) -> list[Op]:
    """What is left when nobody issues some ops, nor waits for them."""
    gone = set(keys) | {key._replace(micro_batch=PREVIOUS) for key in keys}
    return [replace(op, after=tuple(k for k in op.after if k not in gone)) for op in ops if op.key not in gone]


def moved(ops: list[Op], key: Key, before: Key) -> list[Op]:
    """The list with an op, which then waits for nothing, in front of another."""
    (op,) = [op for op in ops if op.key == key]
    rest = [other for other in ops if other.key != key]
    place = next(index for index, other in enumerate(rest) if other.key == before)
    return [*rest[:place], replace(op, after=()), *rest[place:]]


def key_of(ops: Sequence[Op], kind: str, target: str, phase: str | None = None, micro_batch: int = 0) -> Key:
    return next(
        op.key
        for op in ops
        if (op.kind, op.target, op.micro_batch) == (kind, target, micro_batch) and phase in (None, op.phase)
    )


def found(report: Report, kind: str, *words: str) -> None:
    """That some fault is of a kind and says all of some words."""
    told = [f"{fault.kind}: {fault}" for fault in report.faults]
    assert any(each.startswith(kind) and all(word in each for word in words) for each in told), told
