from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.ranks import RankPool
from paceline.strategy import Strategy
from paceline.verify.compare import Comparison, Outcome
from paceline.verify.prepare import Prepared, prepare
from paceline.verify.recipe import recipe_for
from paceline.verify.subject import Subject
from paceline.verify.together import Case
from tests.verify.broken import mend

HERE = "tests.verify.subjects"
BROKEN = "tests.verify.broken"
STEPS = 3
MICRO_BATCHES = (1, 3)


def subject(build: str = "build", place: str = HERE, **settings: object) -> Subject:
    """One of the models in subjects.py, or of another place."""
    return Subject(f"{place}:{build}", **{"data": f"{HERE}:batches", "loss": f"{HERE}:cross_entropy", **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def alone() -> Iterator[RankPool]:
    with RankPool(1, threads=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two() -> Iterator[RankPool]:
    with RankPool(2, threads=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    with RankPool(4, threads=1) as pool:
        yield pool


@pytest.fixture
def prepared(alone: RankPool, tmp_path: Path) -> Callable[..., Prepared]:
    def run(model: Subject, ranks: int = 2, micro_batches: tuple[int, ...] = MICRO_BATCHES) -> Prepared:
        (found,) = alone.run(prepare, model, ranks, micro_batches, STEPS, tmp_path, limit=60)
        return found

    return run


@pytest.fixture
def compare(
    alone: RankPool, two: RankPool, four: RankPool, prepared: Callable[..., Prepared], tmp_path: Path
) -> Callable[..., Outcome]:
    """(model, strategy, micro-batches) -> outcome on two ranks, or on four."""

    def run(
        model: Subject, strategy: Strategy, micro_batches: int = 3, ranks: int = 2, tolerance: float = 1e-9
    ) -> Outcome:
        found = prepared(model, ranks)
        pool = two if ranks == 2 else four
        comparison = Comparison(found.subject, alone, pool, tmp_path, limit=60)
        outcome = comparison.run(Case(strategy, recipe_for(strategy, ranks, micro_batches, STEPS), tolerance))
        pool.run(mend, limit=60)
        return outcome

    return run
