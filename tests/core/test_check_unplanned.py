"""Steps with what only data asks for are right too, and what would be wrong in them is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from paceline.core.build_layout import build_layout
from paceline.core.check import all_ranks, check
from paceline.core.check.busy_step import busy_step, lone_step, step_around_passes
from paceline.core.check.checker import check_steps
from paceline.core.check.sequences import Sequences
from paceline.core.ops import EXTRA, READ, Op
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from tests.core.broken import RIGHT, UNITS, found, job, several
from tests.drawn import jobs, micro_batch_counts, spec
from tests.quick import examples


def busy(ranks: Sequence[Schedule], micro_batches: int) -> list[tuple[Op, ...]]:
    return [busy_step(rank, micro_batches) for rank in ranks]


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(several), micro_batch_counts)
def test_ranks_at_a_pace_of_their_own_get_through_them(ranks: list[Schedule], micro_batches: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequences, "_in_step", Sequences._simulated)
        assert not check_steps(ranks, busy(ranks, micro_batches), micro_batches).require().faults


@pytest.mark.parametrize("name", RIGHT)
def test_a_busy_step_has_all_that_is_planned_but_gathers_and_more(name: str) -> None:
    (rank, *_) = ranks = job(RIGHT[name])
    ops = busy_step(rank, 2)
    planned = {op.key for op in ops if op.planned}
    missing = [op for op in rank.step(2) if op.key not in planned]
    assert all(op.kind == "all_gather" and op.phase != "update" for op in missing)
    # Forwards before both passes and after the last, and a second one in each.
    extra = [op for op in ops if op.kind == "forward" and not op.planned]
    assert len(extra) == (3 + 2) * len(UNITS)
    assert [op.target for op in ops if op.kind == "forward" and op.planned] == [*UNITS[::-1], *UNITS[::-1]]
    assert {op.micro_batch for op in ops if not op.planned} <= set(range(EXTRA - 1, -200, -1))
    report = check(ranks, 2).require()
    steps = (*ops, *step_around_passes(rank, 2), *lone_step(rank))
    assert report.unplanned == sum(not op.planned for op in steps)


def with_kept() -> list[Schedule]:
    """Ranks of which one unit never runs, so that it is gathered once a step."""
    strategy = Strategy(zero=3)
    layout = build_layout([spec(f"{unit}.w", 1024, unit) for unit in UNITS], UNITS, strategy, 4)
    return all_ranks(layout, strategy, 4, UNITS[:-1])


MUTANTS: dict[str, tuple[Any, ...]] = {
    "a unit is not gathered again": (
        *(job(RIGHT["zero 3"]), "gather_again", lambda _, ops: ()),
        *("contents", "not parameters of"),
    ),
    "it is gathered into another's slot": (
        *(job(RIGHT["zero 3"]), "gather_again"),
        lambda rank, ops: tuple(replace(op, writes=(rank.buffers().unsharded(rank.layout.buckets[0]),)) for op in ops),
        *("contents", "not [0, "),
    ),
    "what is kept is not gathered again": (
        *(with_kept(), "gather_kept_again", lambda _, ops: ()),
        *("contents", "not parameters of u4"),
    ),
    "evaluation does not wait for what it gathers": (
        *(job(RIGHT["zero 3"]), "extra_forward"),
        lambda _, ops: tuple(replace(op, after=()) if op.kind == "unshard" else op for op in ops),
        *("race", "unshard of u0 (unplanned", "before it is written by all_gather of u0 (unplanned"),
    ),
    "evaluation computes with what is sharded": (
        *(job(RIGHT["hybrid zero 3"]), "extra_forward"),
        lambda _, ops: tuple(op for op in ops if op.kind != "unshard"),
        *("contents", "nothing has unsharded"),
    ),
    "one rank gathers an update again": (
        *(job(RIGHT["zero 2"]), "gather_update_again", lambda rank, ops: ops if rank.rank == 1 else ()),
        *("deadlock", "other ranks of its group never come to it"),
    ),
    "late gradients are reduced in another order on one rank": (
        *(job(RIGHT["zero 2"]), "reduce_again"),
        lambda rank, ops: tuple(replace(op, target=f"other {op.target}") if rank.rank == 2 else op for op in ops),
        *("sequence", "would mix the two"),
    ),
    "late gradients are reduced among other ranks": (
        *(job(RIGHT["hybrid"]), "reduce_again", lambda _, ops: tuple(replace(op, group="world") for op in ops)),
        *("sequence", "runs among the ranks of group 'world'"),
    ),
    "a parameter is gathered among other ranks": (
        *(job(RIGHT["hybrid zero 3"]), "gather_pinned", lambda _, op: replace(op, group="world")),
        *("sequence", "runs among the ranks of group 'world'"),
    ),
    "buffers are of another size on one rank": (
        *(job(RIGHT["zero 0"]), "send_buffers", lambda rank, op: replace(op, bytes=op.bytes + rank.rank)),
        *("sequence", "but on rank 0 of"),
    ),
    "numbers are summed on the stream of gradients": (
        *(job(RIGHT["hybrid"]), "sum_numbers", lambda _, op: replace(op, stream="reduce")),
        *("sequence", "connects those of 'shard'"),
    ),
    "parameters that ranks share are updated alone while others evaluate": (
        *(job(RIGHT["shared"]), "lone_update"),
        lambda _, ops: tuple(replace(op, after=()) for op in ops if op.target != READ),
        *("race", "no barrier keeps them apart"),
    ),
    "the server sends nothing after an update alone": (
        *(job(RIGHT["parameter server"]), "lone_update", lambda _, ops: ops[:1]),
        *("deadlock", "which no op before it is"),
    ),
    "what an optimizer updates around passes is not sent": (
        *(job(RIGHT["zero 2"]), "update_around_passes", lambda _, ops: ops[:1]),
        *("deadlock", "which no op before it is"),
    ),
    "parameters that ranks share are updated around passes and nobody waits": (
        *(job(RIGHT["shared"]), "update_around_passes"),
        lambda _, ops: tuple(replace(op, after=()) for op in ops),
        *("race", "no barrier keeps them apart"),
    ),
    "ranks meet among others before their first backward": (
        *(job(RIGHT["hybrid zero 3"]), "meet", lambda _, op: replace(op, group="world")),
        *("sequence", "runs among the ranks of group 'world'"),
    ),
    "one rank meets the others at another place": (
        *(job(RIGHT["zero 3"]), "meet"),
        lambda rank, op: replace(op, target="elsewhere") if rank.rank == 2 else op,
        *("sequence", "would mix the two"),
    ),
    "an update alone is of others' shards, too": (
        *(job(RIGHT["zero 2"]), "lone_update"),
        lambda rank, ops: (replace(ops[0], writes=rank.update(0)[0].writes * 2), *ops[1:]),
        *("contents", "does not update this rank's share of every bucket once"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_only_in_them_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, method, change, kind, *words = MUTANTS[name]
    right = getattr(Schedule, method)
    monkeypatch.setattr(Schedule, method, lambda self, *given: change(self, right(self, *given)))
    assert not check_steps(ranks, [rank.step(1) for rank in ranks], 1).faults
    found(check(ranks), kind, *words)


def test_a_forward_between_backward_and_update_is_over_before_shared_parameters_are_written(monkeypatch) -> None:
    ranks = job(RIGHT["shared"])
    assert not check(ranks).faults
    steps = busy(ranks, 1)
    # As if the barrier were launched when gradients are published.
    early = [
        tuple(
            replace(op, after=tuple(key for key in op.after if key.kind == "publish")) if op.kind == "barrier" else op
            for op in ops
        )
        for ops in steps
    ]
    found(check_steps(ranks, early, 1), "race", "no barrier keeps them apart")


def test_shared_parameters_are_not_written_around_passes_before_ranks_agree() -> None:
    ranks = job(RIGHT["shared"])
    steps = [step_around_passes(rank, 1) for rank in ranks]
    assert not check_steps(ranks, steps, 1, agree=True).faults
    found(check_steps(ranks, steps, 1), "race", "no barrier keeps them apart")
    # As if a unit ran once more behind that.
    late = [(*ops[:-2], replace(ops[1], micro_batch=-90, after=()), *ops[-2:]) for ops in steps]
    assert {ops[-3].kind for ops in late} == {"forward"}
    found(check_steps(ranks, late, 1, agree=True), "race", "no barrier keeps them apart")
