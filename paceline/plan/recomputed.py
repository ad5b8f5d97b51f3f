"""Which units compute their activations again in backward: what `engine.recompute` does to a model's blocks. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from paceline.core.strategy import Strategy


def recomputed_units(units: Sequence[str], strategy: Strategy) -> frozenset[str]:
    """Names of the units whose inside is computed again in backward: every k-th of the repeated ones.

    Repeated are those whose names differ in their last number alone, or those that `strategy.units` names.
    """
    if strategy.recompute == "none":
        return frozenset()
    stems = Counter(map(_stem, units))
    if strategy.units:
        repeated = [unit for unit in units if any(fnmatchcase(unit, pattern) for pattern in strategy.units)]
    else:
        repeated = [unit for unit in units if _stem(unit) != unit and stems[_stem(unit)] > 1]
    return frozenset(repeated[strategy.recompute_every - 1 :: strategy.recompute_every])


def _stem(unit: str) -> str:
    return re.sub(r"\d+$", "", unit)
