"""docs/collectives.md shows every algorithm as it is: its picture, its formula, its measured times, its example."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from paceline.core.collectives.algorithms import ALGORITHMS, HIERARCHICAL, REDUCTIONS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "collectives.md"
NAMES = {f"{collective}/{name}" for collective, known in ALGORITHMS.items() for name in known}
NAMES |= {f"{collective}/hierarchical" for collective in HIERARCHICAL}


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("draw_collectives")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("collective_tables")


def shown(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.S)
    assert found, name
    return found[1]


def test_the_pictures_are_of_the_plans_as_they_are(drawing: ModuleType) -> None:
    drawn = {f"{name}.svg": drawing.picture(columns) for name, columns in drawing.PICTURES.items()}
    kept = {path.name: path.read_text() for path in drawing.IMAGES.iterdir()}
    assert drawn == kept, "run docs/draw_collectives.py"
    for name, text in drawn.items():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert len(text) < 100_000
        assert f"](images/collectives/{name})" in PAGE.read_text()


def test_every_algorithm_has_a_picture(drawing: ModuleType) -> None:
    panels = [panel for columns in drawing.PICTURES.values() for column in columns for panel in column]
    assert {panel.name for panel in panels} == NAMES


def test_what_a_picture_leaves_dark_at_the_end_is_the_result(drawing: ModuleType) -> None:
    for panel in (panel for columns in drawing.PICTURES.values() for column in columns for panel in column):
        drawn = drawing.Drawing(panel)
        collective = drawn.collective
        everyone = frozenset(range(panel.ranks))
        for rank, (buffer, needed) in enumerate(zip(drawn.states[-1], drawn.needs[-1], strict=True)):
            dark = {place for place in range(drawn.numel) if needed[place]}
            own, root_alone = collective in ("scatter", "reduce_scatter"), collective in ("reduce", "gather")
            assert dark == ({rank} if own else set() if root_alone and rank else set(range(drawn.numel))), panel.name
            for place in dark:
                if collective in (*REDUCTIONS, "barrier"):
                    assert buffer[place].ranks == everyone, panel.name
                elif collective == "all_to_all":
                    assert (buffer[place].shard, buffer[place].ranks) == (rank, {place})
                else:
                    giver = 0 if collective in ("broadcast", "scatter") else place
                    assert (buffer[place].shard, buffer[place].ranks) == (place, {giver}), panel.name


def test_the_rounds_of_a_picture_cost_what_its_formula_says(drawing: ModuleType, tables: ModuleType) -> None:
    for panel in (panel for columns in drawing.PICTURES.values() for column in columns for panel in column):
        drawn = drawing.Drawing(panel)
        formula = tables.formula_of(panel.name)
        assert len(drawn.turns) == tables.value(formula.rounds, panel.ranks), panel.name
        if drawn.collective != "barrier":
            moved = sum(drawn.busiest(number) for number in range(len(drawn.turns)))
            assert moved == tables.value(formula.terms[2], panel.ranks), panel.name


def test_the_tables_are_what_the_plans_and_measurements_give(tables: ModuleType) -> None:
    found = tables.tables()
    assert len(found) == 2
    for name, table in found.items():
        assert shown(name) == table, "run docs/make_tables.py"
    measured = json.loads((DOCS / "results" / "comm.json").read_text())
    assert shown("comm") == tables.measured(measured), "run docs/make_tables.py"


@pytest.mark.parametrize("wrong", [("2 L", "L"), ("2 (N-1)", "N-1"), ("2 (N-1)", "2 (N-1)/N", "N-1")])
def test_a_wrong_formula_is_not_written(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    tables.check()
    monkeypatch.setitem(tables.FORMULAS, ("all_reduce/ring",), tables.Formula(*wrong))
    with pytest.raises(ValueError, match=r"all_reduce/ring, .* is not what the algorithm counts"):
        tables.tables()


def test_an_algorithm_without_a_formula_is_named(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(tables.FORMULAS, ("all_reduce/tree",))
    with pytest.raises(ValueError, match="all_reduce/tree"):
        tables.tables()


@pytest.mark.parametrize(
    ("term", "said"), [("1", "M"), ("N-1", "(N-1) M"), ("2 (N-1)/N", "2 (N-1)/N M"), ("F+2 X", "(F+2 X) M")]
)
def test_terms_are_multiplied_as_one_writes_it(tables: ModuleType, term: str, said: str) -> None:
    assert tables.times(term, "M") == said


def test_what_was_not_measured_leaves_its_place_empty(tables: ModuleType) -> None:
    def row(transport: str, algorithm: str, size: int, time_us: float) -> dict[str, object]:
        what = {"op": "all_reduce", "ranks": 2, "dtype": "float32", "transport": transport, "algorithm": algorithm}
        return what | {"bytes": size, "time_us": time_us}

    rows = [row("tcp", "ring", 65536, 150.0), row("tcp", "ring", 26214400, 24000.0), row("tcp", "tree", 65536, 100.0)]
    rows.append(row("gloo", "own", 26214400, 30123.0))
    machine = {"cores": 2, "cpu": "a processor", "torch": "2.13"}
    text = tables.measured({"machine": machine, "rounds": 3, "rows": rows})
    lines = text.splitlines()
    assert "| all_reduce | ring | 2 (N-1) α + 2 (N-1)/N M β | 2 α + M β | 0.15 / 24 |" in lines
    assert "| all_reduce | tree | 2 L α + 2 L M β | 2 α + 2 M β | 0.10 /  |" in lines
    assert "| all_reduce | 0.10 / 24 |  / 30 |  |" in lines
    assert "64 KiB / 25 MiB" in lines[0]


def test_a_barrier_has_no_sizes(tables: ModuleType) -> None:
    def row(op: str, transport: str, algorithm: str, size: int, time_us: float) -> dict[str, object]:
        what = {"op": op, "ranks": 4, "dtype": "float32", "transport": transport, "algorithm": algorithm}
        return what | {"bytes": size, "time_us": time_us}

    rows = [row("barrier", "tcp", "doubling", 0, 80.0), row("barrier", "gloo", "own", 0, 950.0)]
    rows.append(row("all_reduce", "tcp", "ring", 65536, 150.0))
    text = tables.measured({"machine": {"cores": 2, "cpu": "a processor", "torch": "2.13"}, "rounds": 3, "rows": rows})
    lines = text.splitlines()
    assert "| barrier | doubling | L α | 2 α | 0.080 |" in lines
    assert "| barrier | 0.080 | 0.95 |  |" in lines
    assert lines[0].endswith("Milliseconds for 64 KiB:")


def test_between_hosts_a_size_that_was_not_measured_leaves_its_place_empty(tables: ModuleType) -> None:
    def row(system: str, setting: str, case: str, median_ms: float, wire_ms: float) -> dict[str, object]:
        where = {"experiment": "hierarchical", "hosts": 2, "ranks_per_host": 2, "gbit": 1.0}
        return where | {"system": system, "setting": setting, "case": case, "median_ms": median_ms, "wire_ms": wire_ms}

    rows = [
        row("Gloo", "all_reduce", "1 MiB", 12.6, 8.4),
        row("paceline", "all_gather/hierarchical over shared memory and tcp", "1 MiB", 4.5, 4.2),
        row("Gloo", "all_reduce", "10 MiB", 130.0, 84.0),
        row("paceline", "all_reduce/hierarchical over shared memory and tcp", "10 MiB", 88.0, 84.0),
    ]
    lines = tables.between_hosts({"machine": {"cores": 2, "cpu": "any", "torch": "2.13"}, "rows": rows}).splitlines()
    assert lines[0].startswith("2 hosts with 2 ranks each") and lines[0].endswith("for 1 MiB / 10 MiB:")
    assert lines[4:] == [
        "| all_reduce | Gloo |  |  | 13 / 130 |",
        "| all_reduce | hierarchical | 4 α + 2 (N-1)/N M β | M |  / 88 |",
        "| all_reduce | what the wire alone takes |  | M | 8.4 / 84 |",
        "| all_gather | hierarchical | 2 α + (N-1)/N M β | 1/2 M | 4.5 /  |",
        "| all_gather | what the wire alone takes |  | 1/2 M | 4.2 /  |",
    ]


def test_the_example_is_the_one_in_the_page() -> None:
    body = (ROOT / "examples" / "collectives.py").read_text().split('"""\n\n', 1)[1].split("\nif ")[0]
    assert f"```python\n{body}```" in PAGE.read_text()


def test_the_plan_in_the_page_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ((code, printed),) = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", PAGE.read_text())
    exec(code, {})
    assert capsys.readouterr().out == printed
