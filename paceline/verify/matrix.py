"""`paceline verify --matrix`: runs every mix of settings on one small model."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from paceline.launch.pool import RankPool
from paceline.verify.compare import Comparison
from paceline.verify.explain import explain
from paceline.verify.matrix_report import summary, tables, write_page
from paceline.verify.mixes import MICRO_BATCHES, RANKS, SPECS, STEPS, TOLERANCES, Cell, Precision, mixes
from paceline.verify.parallel_run import Case
from paceline.verify.prepare import prepare
from paceline.verify.recipe import recipe_for


def run_matrix(markdown: str, limit: float, folder: Path) -> int:
    """Runs all mixes, tells what differs, and writes the page if one is named.

    Args:
        markdown: File to write, or "".
        limit: Seconds for one mix.
        folder: Empty, for batches and references.

    Returns:
        0 if all are equal, 1 if not.
    """
    start = time.monotonic()
    cells: list[Cell] = []
    with RankPool(1, threads=1) as single, RankPool(RANKS, threads=1) as ranks:
        comparisons: dict[Precision, Comparison] = {}
        for precision, spec in SPECS.items():
            place = folder / precision
            place.mkdir()
            (prepared,) = single.run(prepare, spec, RANKS, MICRO_BATCHES, STEPS, place, limit=limit)
            comparisons[precision] = Comparison(prepared.spec, single, ranks, place, limit)
        for (precision, name), group in itertools.groupby(mixes(), lambda mix: (mix[1].precision, mix[0])):
            done = []
            for _, strategy, micro_batches in group:
                case = Case(strategy, recipe_for(strategy, RANKS, micro_batches, STEPS), TOLERANCES[precision])
                done.append(Cell(name, strategy, micro_batches, comparisons[precision].run(case)))
                _tell(done[-1])
            print(f"{precision}, {name}: {summary(done)}", flush=True)
            cells += done
    print("\n" + tables(cells))
    print(f"\n{summary(cells)}, in {time.monotonic() - start:.0f} s")
    if markdown:
        write_page(Path(markdown), cells)
    return 0 if all(cell.outcome.equal for cell in cells) else 1


def _tell(cell: Cell) -> None:
    if cell.outcome.equal:
        return
    s, first = cell.strategy, cell.outcome.report.first
    why = explain(first) if first is not None else cell.outcome.raised
    settings = f"precision={s.precision}, accumulation={s.accumulation}, recompute={s.recompute}"
    print(f"{cell.system}, {settings}, {cell.micro_batches} micro-batches: {why}", flush=True)
