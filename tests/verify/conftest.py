from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.core.strategy import Strategy
from paceline.launch.pool import RankPool
from paceline.verify.compare import Comparison, Outcome
from paceline.verify.model_spec import ModelSpec
from paceline.verify.parallel_run import Case
from paceline.verify.prepare import Prepared, prepare
from paceline.verify.recipe import recipe_for
from tests.verify.broken import mend

HERE = "tests.verify.user_models"
BROKEN = "tests.verify.broken"
STEPS = 3
MICRO_BATCHES = (1, 3)


def spec(build: str = "build", place: str = HERE, **settings: object) -> ModelSpec:
    """One of the models in user_models.py, or of another place."""
    return ModelSpec(f"{place}:{build}", **{"data": f"{HERE}:batches", "loss": f"{HERE}:cross_entropy", **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def single() -> Iterator[RankPool]:
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
def prepared(single: RankPool, tmp_path: Path) -> Callable[..., Prepared]:
    def run(model: ModelSpec, ranks: int = 2, micro_batches: tuple[int, ...] = MICRO_BATCHES) -> Prepared:
        (found,) = single.run(prepare, model, ranks, micro_batches, STEPS, tmp_path, limit=60)
        return found

    return run


@pytest.fixture
def compare(
    single: RankPool, two: RankPool, four: RankPool, prepared: Callable[..., Prepared], tmp_path: Path
) -> Callable[..., Outcome]:
    """(model, strategy, micro-batches) -> outcome on two ranks, or on four."""

    def run(
        model: ModelSpec, strategy: Strategy, micro_batches: int = 3, ranks: int = 2, tolerance: float = 1e-9
    ) -> Outcome:
        found = prepared(model, ranks, (micro_batches,))
        pool = two if ranks == 2 else four
        comparison = Comparison(found.spec, single, pool, tmp_path, limit=60)
        outcome = comparison.run(Case(strategy, recipe_for(strategy, ranks, micro_batches, STEPS), tolerance))
        pool.run(mend, limit=60)
        return outcome

    return run
