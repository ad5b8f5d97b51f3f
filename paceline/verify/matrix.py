"""`paceline verify --matrix`: every mix of strategy, accumulation, precision and recomputing, on one small model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.errors import UserError
from paceline.ranks import RankPool
from paceline.strategy import SYSTEMS, Accumulation, Strategy
from paceline.verify.compare import Comparison, Outcome
from paceline.verify.explain import explain
from paceline.verify.prepare import prepare
from paceline.verify.recipe import recipe_for
from paceline.verify.subject import Subject
from paceline.verify.together import Case

Precision = Literal["float32", "bfloat16", "float16"]
Recompute = Literal["none", "unit", "keep_attention"]

RANKS = 4
"""The fewest that can be sharded in several groups."""
STEPS = 3
MICRO_BATCHES = (1, 3)
BUCKET_MB = 0.1
"""Makes about ten buckets of the model."""

BUILD = "paceline.verify.nano:build"

ACCUMULATIONS: tuple[Accumulation, ...] = ("each", "defer", "hold")
RECOMPUTING: tuple[Recompute, ...] = ("none", "unit", "keep_attention")

SUBJECTS: Mapping[Precision, Subject] = {
    "float32": Subject(BUILD, dtype="float64"),
    "bfloat16": Subject(BUILD, dtype="float32"),
    "float16": Subject(BUILD, dtype="float32"),
}
"""By precision, what is trained. precision=float32 leaves the model in its own dtype, here float64, where rounding is
told from errors by many orders of magnitude. The others compute with copies of fp32 weights."""

TOLERANCES: Mapping[Precision, float] = {"float32": 1e-9, "bfloat16": 1e-5, "float16": 1e-5}
"""Largest relative difference that counts as equal, by precision."""


@dataclass(frozen=True)
class Cell:
    """One mix of settings, and what became of it."""

    system: str
    strategy: Strategy
    micro_batches: int
    outcome: Outcome

    @property
    def size(self) -> float:
        """Largest relative difference of anything that was compared but the norm."""
        return max((size for kind, size in self.outcome.report.largest.items() if kind != "norm"), default=0.0)

    @property
    def norm(self) -> float:
        """Largest relative difference of the norm, which each side sums in its own way."""
        return self.outcome.report.largest.get("norm", 0.0)


def systems() -> dict[str, Strategy]:
    """The systems of data parallelism's history, the stages of ZeRO, one copy a host, and hybrid sharding."""
    stages = {f"zero {stage}": Strategy(zero=stage) for stage in (1, 2, 3)}
    stages["zero 2, one copy"] = Strategy(zero=2, share_parameters=True)
    hybrid = {f"zero {stage}, groups of 2": Strategy(zero=stage, shard=2) for stage in (1, 2, 3)}
    return {**{f"zero 0: {name}": strategy for name, strategy in SYSTEMS.items()}, **stages, **hybrid}


def mixes() -> Iterator[tuple[str, Strategy, int]]:
    """Every mix of settings that `Strategy` allows, and numbers of micro-batches."""
    for precision in SUBJECTS:
        for name, system in systems().items():
            for accumulation in ACCUMULATIONS:
                for recompute in RECOMPUTING:
                    try:
                        strategy = replace(
                            system,
                            precision=precision,
                            accumulation=accumulation,
                            recompute=recompute,
                            bucket_mb=BUCKET_MB,
                        )
                    except UserError:
                        continue
                    for micro_batches in MICRO_BATCHES:
                        yield name, strategy, micro_batches


def run_matrix(markdown: str, limit: float, folder: Path) -> int:
    """Runs all mixes, tells what differs, and writes the page if one is named.

    Args:
        markdown: File to write, or "".
        limit: Seconds for one mix.
        folder: Empty, for batches and references.

    Returns:
        0 if all are equal, 1 if not.
    """
    from paceline.verify.page import summary, tables, write_page

    start = time.monotonic()
    cells: list[Cell] = []
    with RankPool(1, threads=1) as alone, RankPool(RANKS, threads=1) as ranks:
        comparisons: dict[Precision, Comparison] = {}
        for precision, subject in SUBJECTS.items():
            place = folder / precision
            place.mkdir()
            (prepared,) = alone.run(prepare, subject, RANKS, MICRO_BATCHES, STEPS, place, limit=limit)
            comparisons[precision] = Comparison(prepared.subject, alone, ranks, place, limit)
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
