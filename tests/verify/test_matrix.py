from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.verify.compare import Comparison, Outcome
from paceline.verify.differences import Difference, Report
from paceline.verify.matrix_report import summary, tables, write_page
from paceline.verify.mixes import BUILD, MICRO_BATCHES, RANKS, SPECS, TOLERANCES, Cell, mixes, systems
from paceline.verify.model_spec import ModelSpec
from paceline.verify.parallel_run import Case
from paceline.verify.prepare import prepare
from paceline.verify.recipe import recipe_for
from tests.quick import full


def cell(system: str, strategy: Strategy, size: float = 0.0, raised: str = "", micro_batches: int = 1) -> Cell:
    first = Difference("gradient", 1, 0, 2, size, 3, "p", "u", "b", "all_reduce") if size > 1e-9 else None
    case = Case(strategy, recipe_for(strategy, RANKS, micro_batches, 3), 1e-9)
    report = Report({"gradient": size, "norm": 1e-7}, first)
    return Cell(system, strategy, micro_batches, Outcome(case, report, raised))


def test_every_mix_that_a_strategy_allows_is_there() -> None:
    found = [(name, s.precision, s.accumulation, s.recompute, m) for name, s, m in mixes()]
    assert len(set(found)) == len(found)
    assert {name for name, *_ in found} == set(systems()) and len(systems()) == len(SYSTEMS) + 7
    assert {strategy.stage for strategy in systems().values()} == {0, 1, 2, 3}
    assert {precision for _, precision, *_ in found} == {"float32", "bfloat16", "float16"}
    assert {recompute for *_, recompute, _ in found} == {"none", "unit", "keep_attention"}
    holds = {name for name, _, accumulation, _, _ in found if accumulation == "hold"}
    assert holds == {"zero 3", "zero 3, groups of 2"}
    for accumulation in ("each", "defer"):
        assert ("zero 2", "bfloat16", accumulation, "unit", 3) in found
    assert ("zero 0: parameter server", "float32", "defer", "none", 1) in found
    with pytest.raises(UserError):
        replace(SYSTEMS["parameter server"], accumulation="each")


# A mix of each kind, out of some four hundred.
CHOSEN = [
    full("zero 0: per parameter, overlapped", "bfloat16", "each"),
    ("zero 1, groups of 2", "bfloat16", "each"),
    full("zero 2, groups of 2", "float32", "defer"),
    ("zero 3", "float16", "hold"),
]


@pytest.mark.parametrize(("name", "precision", "accumulation"), CHOSEN)
def test_a_mix_is_equal_to_one_process(single, four, tmp_path: Path, name, precision, accumulation) -> None:
    (strategy,) = [
        s
        for n, s, m in mixes()
        if (n, s.precision, s.accumulation, s.recompute, m) == (name, precision, accumulation, "none", 3)
    ]
    (prepared,) = single.run(prepare, SPECS[precision], RANKS, MICRO_BATCHES, 2, tmp_path, limit=60)
    case = Case(strategy, recipe_for(strategy, RANKS, 3, 2), TOLERANCES[precision])
    outcome = Comparison(prepared.spec, single, four, tmp_path, limit=60).run(case)
    assert outcome.verdict == "equal", outcome


def test_a_setting_that_no_rank_can_run_raises_and_the_next_is_not_hurt(single, four, tmp_path: Path) -> None:
    spec = ModelSpec(BUILD)
    single.run(prepare, spec, RANKS, (1,), 1, tmp_path, limit=60)
    comparison = Comparison(spec, single, four, tmp_path, limit=60)
    wrong = Strategy(units=("no_such_module",))
    outcome = comparison.run(Case(wrong, recipe_for(wrong, RANKS, 1, 1), 1e-9))
    assert outcome.verdict == "raises" and "no_such_module" in outcome.raised
    assert comparison.run(Case(Strategy(), recipe_for(Strategy(), RANKS, 1, 1), 1e-9)).verdict == "equal"


def test_the_tables_show_the_largest_difference_and_what_is_wrong(tmp_path: Path) -> None:
    defer = Strategy(accumulation="defer")
    cells = [
        cell("zero 1", replace(defer, zero=1), 2e-16),
        cell("zero 1", replace(defer, zero=1), 3e-16, micro_batches=3),
        cell("zero 2", replace(defer, zero=2), 0.5),
        cell("zero 3", replace(defer, zero=3, recompute="unit"), raised="ValueError: not yet"),
        cell("zero 3", replace(defer, zero=3, precision="bfloat16")),
    ]
    rows = {
        (title, row.split("|")[1].strip()): [entry.strip() for entry in row.split("|")[2:-1]]
        for title, table in enumerate(tables(cells).split("## ")[1:])
        for row in table.splitlines()[4:]
        if row
    }
    # Columns: each, defer and hold; in each nothing, units, and all but attention recomputed.
    assert rows[0, "zero 1"] == ["", "", "", "3e-16", "", "", "", "", ""]
    assert rows[0, "zero 2"][3] == "**differs: 5e-01**"
    assert rows[0, "zero 3"][4] == "raises"
    assert rows[1, "zero 3"][3] == "0"
    assert summary(cells) == "3 of 5 mixes equal, largest difference 5e-01 (of norms 1e-07)"

    write_page(tmp_path / "page.md", cells)
    page = (tmp_path / "page.md").read_text()
    for words in ("- ValueError: not yet", "2 of 4 mixes equal", "1 of 1 mixes equal", "| machine |"):
        assert words in page
    assert max(map(len, page.split("##")[0].splitlines())) <= 120
