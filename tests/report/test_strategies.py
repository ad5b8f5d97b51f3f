from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.strategy import SYSTEMS, Strategy
from paceline.report.program import Program
from paceline.report.strategies import Compared, compared
from tests.core.test_simulate import schedule
from tests.report.test_prediction import program
from tests.report.test_what_if import asked


def on(ranks: int, strategy: Strategy) -> Program:
    known = schedule(strategy, ranks)
    return Program(known, 1, tuple(slot.spec for slot in known.layout.slots))


def by_name(known: Program) -> dict[str, Compared]:
    return {each.name: each for each in compared(known, None)[0]}


def test_bytes_are_the_textbooks() -> None:
    ranks, parameters = 8, 4 * 4096
    rows = by_name(on(ranks, Strategy()))
    share = (ranks - 1) / ranks
    for name in ("buckets, overlapped", "flat, after backward", "zero 1", "zero 2"):
        assert rows[name].sent == 2 * share * parameters
    # Of four units the last two are still there when backward begins, and are not gathered again.
    assert rows["zero 3"].sent == 2.5 * share * parameters
    # M (N - 1) into the server, and out of it.
    assert rows["parameter server"].sent == rows["parameter server"].received == (ranks - 1) * parameters
    assert rows["hybrid: zero 3 in groups of 4"].held > rows["zero 3"].held
    assert rows["buckets, overlapped"].held > rows["zero 1"].held


def test_times_are_simulated_with_what_the_runs_ops_took() -> None:
    known = program(Strategy(bucket_mb=0.004))
    costs = asked(known)
    found = {each.name: each for each in compared(known, costs)[0]}
    assert found["buckets, overlapped"].is_own
    own = found["buckets, overlapped"].step
    assert own == costs.predict(costs.own)
    after, server = found["buckets, after backward"].step, found["parameter server"].step
    assert own is not None and after is not None and server is not None
    assert own.seconds < after.seconds and own.seconds < server.seconds


def test_a_run_of_another_kind_is_a_row_of_its_own() -> None:
    known = program(Strategy(zero=1, packing="flat"))
    (own,) = (each for each in compared(known, None)[0] if each.is_own)
    assert own.name == "zero 1 as this run has it"
    assert all(each.step is None for each in compared(known, None)[0])


def test_what_does_not_go_with_the_runs_precision_is_said() -> None:
    known = on(2, replace(SYSTEMS["manual"], precision="bfloat16"))
    listed, refused = compared(known, None)
    assert "parameter server" not in {each.name for each in listed}
    assert [each.partition(":")[0] for each in refused] == ["hybrid", "parameter server"] and "float32" in refused[1]
    assert next(each for each in listed if each.is_own).name.startswith("manual")


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks_form_no_groups(ranks: int) -> None:
    assert not any(name.startswith("hybrid") for name in by_name(on(ranks, Strategy())))
