"""A step moment by moment: what is held is what the stage says, and nothing comes from nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.core.build_layout import build_layout
from paceline.core.parameter_server import ParameterServer
from paceline.core.placement import DEPTH
from paceline.core.schedule import Schedule
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.report.holdings import BEFORE, NOTHING, UPDATED
from paceline.report.moments import Moment, moments
from paceline.report.prediction import Prediction
from paceline.report.program import Program
from paceline.report.what_if import WhatIf
from tests.core.test_simulate import schedule
from tests.drawn import spec
from tests.report.test_what_if import LINK, ran

SMALL = 0.004
"""MiB: a unit's gradients fill a bucket."""


def program(strategy: Strategy, ranks: int, micro_batches: int = 1) -> Program:
    known = schedule(strategy, ranks)
    return Program(known, micro_batches, tuple(slot.spec for slot in known.layout.slots))


def step(known: Program, way: str = "ring", timed: bool = False) -> list[Moment]:
    times = WhatIf(known, Prediction(known, ran(known)), LINK).times() if timed else None
    found = moments(known, way, times)
    assert found is not None
    return found


def states(listed: list[Moment]) -> Iterator[tuple[Moment, dict[int, tuple[str, str, str]]]]:
    """After each moment, every bucket's gradients, reduced ones and parameters."""
    held: dict[int, tuple[str, str, str]] = {}
    for moment in listed:
        held = held | {each.bucket: (each.gradients, each.reduced, each.parameters) for each in moment.held}
        yield moment, held


def rows(text: str, ranks: int) -> list[str]:
    """What each rank holds."""
    wide = len(text) // ranks
    return [text[rank * wide : (rank + 1) * wide] for rank in range(ranks)]


KINDS = {
    **SYSTEMS,
    "zero 1": Strategy(zero=1, bucket_mb=SMALL),
    "zero 2": Strategy(zero=2, bucket_mb=SMALL),
    "zero 3": Strategy(zero=3),
    "hybrid": Strategy(zero=3, shard=2),
    "hybrid zero 1": Strategy(zero=1, shard=2),
    "shared": Strategy(zero=2, share_parameters=True),
    "each": Strategy(accumulation="each"),
    "hold": Strategy(zero=3, accumulation="hold"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_update_finds_every_ranks_gradients_and_the_step_ends_with_new_parameters(
    name: str, micro_batches: int
) -> None:
    ranks = 4
    known = program(KINDS[name], ranks, micro_batches)
    place = known.schedule
    before: dict[int, tuple[str, str, str]] = {}
    updates = 0
    for moment, held in states(step(known, timed=micro_batches == 1)):
        if "updated" in moment.told and not updates:
            updates += 1
            for gradients, reduced, _ in before.values():
                for rank in range(1 if isinstance(place, ParameterServer) else ranks):
                    mine = rows(gradients, ranks)[rank]
                    own = mine if place.shards == 1 else mine[rank % place.shards]
                    assert set(reduced[rank] if reduced else own) == {str(ranks)}, moment.told
        before = held
    assert updates == 1
    for gradients, reduced, parameters in before.values():
        assert set(gradients + reduced) == {NOTHING}
        for rank, mine in enumerate(rows(parameters, ranks)):
            if place.shards_parameters:
                own = rank % place.shards
                assert mine == NOTHING * own + UPDATED + NOTHING * (place.shards - own - 1)
            else:
                assert set(mine) == {UPDATED}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_adds_one_rank_a_round_and_a_tree_twice_as_many(ranks: int) -> None:
    def counts(way: str) -> list[list[str]]:
        found = [m for m in step(program(Strategy(), ranks), way) if m.told.startswith("All-reduce")]
        return [rows(m.held[0].gradients, ranks) for m in found]

    ring = counts("ring")
    assert len(ring) == 2 * (ranks - 1)
    for number, held in enumerate(ring[: ranks - 1], start=1):
        assert [max(map(int, mine)) for mine in held] == [number + 1] * ranks
    assert ring[-1] == [str(ranks) * ranks] * ranks
    tree = counts("tree")
    assert len(tree) == 2 * (ranks - 1).bit_length()
    assert tree[len(tree) // 2 - 1][0] == str(ranks) * ranks


def test_zero_3_holds_two_units_whole_and_zero_2_two_buckets_of_gradients() -> None:
    for zero in (2, 3):
        for moment, held in states(step(program(Strategy(zero=zero, bucket_mb=SMALL), 2))):
            whole = [set(parameters) <= {BEFORE} for _, _, parameters in held.values()]
            unreduced = [set(gradients) != {NOTHING} for gradients, _, _ in held.values()]
            assert sum(unreduced) <= DEPTH, moment.told
            if zero == 3:
                assert sum(whole) <= DEPTH, moment.told


def test_a_unit_of_two_buckets_is_held_whole() -> None:
    names = ("u0", "u1", "u2")
    specs = [spec(f"{name}.{d}", 1024, name, d) for name in names for d in ("float32", "bfloat16")]
    layout = build_layout(specs, names, Strategy(zero=3), 2)
    known = Program(Schedule(layout, Strategy(zero=3), 2, 0, names), 1, tuple(specs))
    found = [held for moment, held in states(step(known)) if moment.told.startswith("All-gather of u1 bfloat16")]
    whole = sorted(bucket for bucket, (_, _, parameters) in found[0].items() if set(parameters) == {BEFORE})
    assert len(whole) == 4


def test_buckets_fill_from_the_last_unit_to_the_first() -> None:
    filled = [m.held[0].filled for m in step(program(Strategy(), 2)) if m.told.startswith("Backward of")]
    assert filled == [25, 50, 75, 100]
    told = [m.told for m in step(program(Strategy(), 2)) if m.told.startswith("Backward of")]
    assert [text.split()[2] for text in told] == ["u3", "u2", "u1", "u0"]


def test_what_runs_beside_something_else_comes_when_it_happens() -> None:
    known = program(Strategy(bucket_mb=SMALL), 2)
    listed = step(known, timed=True)
    at = [moment.at for moment in listed]
    assert None not in at and at == sorted(at)  # type: ignore[type-var]
    told = [moment.told for moment in listed]
    first, second = (next(i for i, t in enumerate(told) if f"bucket 0 (4.00 KiB), round {n} of 2" in t) for n in (1, 2))
    # A bucket takes longer than a unit's backward, which then lies between its rounds.
    assert any(text.startswith("Backward of u2") for text in told[: second + 1])
    assert first < second
    assert {moment.told for moment in listed} == {moment.told for moment in step(known)}


def test_too_many_moments_are_none() -> None:
    assert moments(program(Strategy(packing="parameter"), 16, 2)) is not None
    known = schedule(Strategy(zero=3), 16, units=60)
    specs = tuple(slot.spec for slot in known.layout.slots)
    assert moments(Program(known, 8, specs)) is None
    # Of fewer units all rounds of a collective are one moment, after which the same is held.
    known = schedule(Strategy(zero=3), 16, units=30)
    short = step(Program(known, 1, specs[:30]))
    assert "All-gather of u0 (4.00 KiB), 15 rounds." in {moment.told for moment in short}
    (*_, (_, held)) = states(short)
    assert {parameters for *_, parameters in held.values()} == {
        "".join(UPDATED if chunk == rank else NOTHING for rank in range(16) for chunk in range(16))
    }
