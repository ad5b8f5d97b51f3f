"""Drawn programs find again what ordinary training code was once silently wrong by."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.mutants import with_mutant
from tests.programs.outcome import Outcome
from tests.programs.program import draw
from tests.programs.run import outcome
from tests.quick import full
from tests.ranks import RankPool

FOUND_BY = {
    "gradients that stay count twice": (3, 5),
    "completion by modules": (24, 4),
    "placeholders are read": (25, 8),
    "a forward between backward and step": (195, 207, 134),
    "units inside others": (352, 3),
}
"""Seeds of programs that are wrong by each, and by nothing else."""

CASES = [(name, seed) if seed == seeds[0] else full(name, seed) for name, seeds in FOUND_BY.items() for seed in seeds]


def outcome_with(mutant: str, seed: int, ranks: RankPool) -> Outcome:
    def run(n: int, *call: Any, timeout: float) -> list[Any]:
        return ranks(n, with_mutant, mutant, *call, timeout=timeout)

    return outcome(draw(seed), run)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mutant", "seed"), CASES)
def test_it_is_found_and_nothing_is_wrong_without_it(ranks: RankPool, mutant: str, seed: int) -> None:
    # What does not wait for another rank may find it ready by chance.
    for _ in range(5):
        wrong = outcome_with(mutant, seed, ranks)
        if wrong.kind in ("WRONG", "RAISED"):
            break
    right = outcome_with("none", seed, ranks)
    assert wrong.kind in ("WRONG", "RAISED"), f"{wrong.kind}: {wrong.why}"
    assert right.fine, f"{right.kind}: {right.why}"
