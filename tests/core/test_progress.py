"""Whatever a rank computes or skips of a schedule: collectives go in order, each after all that it comes after."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ops import COMPUTE, Key, Op
from paceline.core.progress import Progress
from paceline.core.schedule import Schedule
from tests.drawn import micro_batch_counts, schedules


def by_stream(ops: list[Op]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = defaultdict(list)
    for op in ops:
        found[op.stream].append(op.key)
    return found


@given(schedules(), micro_batch_counts, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.2, 1.0]))
def test_collectives_are_launched_in_order_after_what_they_come_after(
    schedule: Schedule, micro_batches: int, random: object, skips: float
) -> None:
    progress, ops = Progress(), list(schedule.step(micro_batches))
    progress.load(ops)
    over, launched = set[Key](), list[Op]()

    def launch() -> None:
        for op in progress.ready():
            assert over.issuperset(op.after), "before what it comes after"
            over.add(op.key)
            launched.append(op)

    launch()
    for op in ops:
        if op.kind in COMPUTE:
            if random.random() < skips:  # type: ignore[attr-defined]
                continue
            assert progress.begin(op.key) == op
            progress.done(op.key)
            over.add(op.key)
            launch()
    collectives = [op for op in ops if op.kind not in COMPUTE]
    if not skips:
        assert len(launched) == len(collectives)
    progress.skip_all()
    over.update(op.key for op in ops if op.kind in COMPUTE)
    launch()
    progress.require_empty()
    assert by_stream(launched) == by_stream(collectives)
    assert not any(progress.needed(op.key) for op in collectives)


@given(schedules(), micro_batch_counts, st.randoms(use_true_random=False))
def test_a_collective_that_is_waited_for_goes_with_those_before_it_alone(
    schedule: Schedule, micro_batches: int, random: object
) -> None:
    progress, ops = Progress(), list(schedule.step(micro_batches))
    progress.load(ops)
    collectives = [op for op in ops if op.kind not in COMPUTE]
    if not collectives:
        return
    wanted = random.choice(collectives)  # type: ignore[attr-defined]
    launched = list(progress.ready())
    if (op := progress.needed(wanted.key)) is not None:
        progress.skip(op.stream, wanted.key)
        launched += progress.ready()
    assert wanted in launched
    for stream, keys in by_stream(launched).items():
        assert by_stream(collectives)[stream][: len(keys)] == keys
    # What it came after and was skipped runs as planned, if it runs after all.
    for op in ops:
        if op.kind in COMPUTE:
            assert progress.begin(op.key).planned
            progress.done(op.key)
            assert not progress.begin(op.key).planned


def test_what_nothing_launches_is_told() -> None:
    progress = Progress()
    progress.load([Op("all_reduce", "bucket 0", 0, "backward", "reduce", after=(Key("copy_in", "u", 0, "backward"),))])
    progress.skip_all()
    assert not list(progress.ready())
    with pytest.raises(RuntimeError, match="collectives that nothing launches"):
        progress.require_empty()
