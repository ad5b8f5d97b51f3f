"""Verifies the user's own model: every stage against one process, as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from paceline.launch.cores import threads_per_rank
from paceline.launch.pool import RankPool, RanksFailed
from paceline.verify.arguments import VerifyArguments
from paceline.verify.compare import Comparison, Outcome
from paceline.verify.differences import Kind
from paceline.verify.explain import explain
from paceline.verify.model_spec import ModelSpec
from paceline.verify.parallel_run import Case
from paceline.verify.prepare import Prepared, prepare
from paceline.verify.recipe import recipe_for

TOLERANCE: Mapping[str, float] = {"float64": 1e-9, "float32": 1e-3}
"""Largest relative difference that rounding explains. An error of logic is larger by far."""

COLUMNS: tuple[Kind, ...] = ("gradient", "norm", "updated", "loss")
WIDTH = 100


def verify_model(options: VerifyArguments, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Prints a line for each stage and number of micro-batches, then what differs.

    Args:
        options: The command's.
        folder: Empty, for batches and references.

    Returns:
        0 if all is equal, 1 if not; and what each comparison found, ready for JSON.

    Raises:
        UserError: The model cannot be built, fed or trained in one process.
    """
    wanted = ModelSpec(options.build, options.data, options.loss, options.dtype, options.eval)
    threads = threads_per_rank(0, options.workers)
    with RankPool(1, threads) as single, RankPool(options.workers, threads) as ranks:
        args = (wanted, options.workers, options.micro_batches, options.steps, folder)
        try:
            (prepared,) = single.run(prepare, *args, limit=options.timeout)
        except RanksFailed as failed:
            raise UserError(f"one process alone cannot run {options.build}:\n{failed.failure.text}") from None
        for note in prepared.notes:
            _tell(f"note: {note}")
        if prepared.obstacles:
            for obstacle in prepared.obstacles:
                _tell(f"cannot be equal: {obstacle}.")
            return 1, []
        comparison = Comparison(prepared.spec, single, ranks, folder, options.timeout)
        print(_HEADER)
        outcomes: list[tuple[str, Outcome]] = []
        for name, case in cases(options, prepared):
            outcomes.append((name, comparison.run(case)))
            print(_line(*outcomes[-1], options.workers), flush=True)
    _explain(outcomes, prepared)
    found = [{"stage": name, **_figures(outcome)} for name, outcome in outcomes]
    return _conclude([outcome for _, outcome in outcomes], prepared), found


def cases(options: VerifyArguments, prepared: Prepared) -> Iterable[tuple[str, Case]]:
    """Every stage, and hybrid sharding where ranks form equal groups, with every number of micro-batches."""
    # Small enough for several buckets, or nothing would overlap.
    size = min(25.0, max(prepared.bytes / 4, 1.0) / 2**20)
    stages = {f"zero {stage}": Strategy(zero=stage, bucket_mb=size) for stage in (0, 1, 2, 3)}
    group = next((g for g in range(2, options.workers) if options.workers % g == 0), 0)
    if group:
        stages[f"hybrid: zero 3 in groups of {group}"] = Strategy(zero=3, shard=group, bucket_mb=size)
    for name, strategy in stages.items():
        for micro_batches in prepared.micro_batches:
            recipe = recipe_for(strategy, options.workers, micro_batches, options.steps)
            yield name, Case(strategy, recipe, TOLERANCE[prepared.spec.dtype])


_HEADER = (
    f"{'stage':<30} {'ranks':>5} {'micro-batches':>13} {'gradients':>10} {'norm':>10} {'weights':>10} {'loss':>10}"
)


def _line(name: str, outcome: Outcome, ranks: int) -> str:
    largest = _largest(outcome)
    sizes = " ".join(f"{'-' if outcome.raised else _size(largest[column]):>10}" for column in COLUMNS)
    return f"{name:<30} {ranks:>5} {outcome.case.recipe.micro_batches:>13} {sizes}  {outcome.verdict}"


def _largest(outcome: Outcome) -> dict[Kind, float]:
    """The largest relative difference of each kind."""
    largest = dict(outcome.report.largest)
    largest["updated"] = max(largest.get("updated", 0.0), largest.get("weights", 0.0))
    return {column: largest.get(column, 0.0) for column in COLUMNS}


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "micro_batches": outcome.case.recipe.micro_batches,
        "equal": outcome.equal,
        "raised": outcome.raised,
        "differences": {} if outcome.raised else _largest(outcome),
    }


def _size(number: float) -> str:
    return f"{number:.1e}" if number else "0"


def _explain(outcomes: list[tuple[str, Outcome]], prepared: Prepared) -> None:
    """What differs, once for all the cases in which the same does."""
    alike: dict[object, list[tuple[str, Outcome]]] = {}
    for name, outcome in outcomes:
        first = outcome.report.first
        if not outcome.equal:
            what = replace(first, size=0.0, sequence=0) if first is not None else outcome.raised
            alike.setdefault(what, []).append((name, outcome))
    for group in alike.values():
        print()
        _tell("; ".join(f"{name}, {outcome.case.recipe.micro_batches} micro-batches" for name, outcome in group) + ":")
        first = group[0][1].report.first
        if first is not None:
            _tell(explain(first, prepared.changing), "  ")
        else:
            print(textwrap.indent(group[0][1].details.rstrip() or group[0][1].raised, "  "))
    raising = {outcome.case.strategy.stage for _, outcome in outcomes if outcome.raised}
    if raising == {3}:
        _tell(
            "Only zero 3 raises, where a parameter is whole only while its unit computes: code that reads one outside "
            "its unit's forward finds this rank's shard of it. Name a module that holds both as a unit, with "
            "Strategy(units=...)"
        )


def _conclude(outcomes: list[Outcome], prepared: Prepared) -> int:
    dtype = prepared.spec.dtype
    print()
    if all(outcome.equal for outcome in outcomes):
        _tell(f"all equal to one process: {dtype}, differences up to {TOLERANCE[dtype]:g} count as rounding")
        return 0
    wrong = sum(not outcome.equal for outcome in outcomes)
    _tell(f"{wrong} of {len(outcomes)} comparisons are not equal to one process ({dtype}, above {TOLERANCE[dtype]:g})")
    return 1


def _tell(text: str, indent: str = "") -> None:
    folded = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)
    print("\n".join(folded) or indent, flush=True)
