"""What users write around a model is right at every stage, or refused in words; `python -m tests.idioms` runs all."""

from __future__ import annotations

import pytest

from tests.idioms.run import IDIOMS, PLACES, held
from tests.ranks import RankPool

SLOW = {"a compiled block"}

CASES = [(name, place) for name, idiom in IDIOMS.items() for place in PLACES if idiom.low or not place.endswith("low")]
"""Every idiom everywhere. A plain `pytest` runs each in one place, another one in turn."""


def case(name: str, place: str) -> pytest.param:
    near = [place for idiom, place in CASES if idiom == name]
    quick = place == near[list(IDIOMS).index(name) % len(near)] and name not in SLOW
    marks = [] if quick else [pytest.mark.full]
    return pytest.param(name, place, id=f"{name}: {place}", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "place"), [case(*each) for each in CASES])
def test_an_idiom_is_right_or_refused(ranks: RankPool, name: str, place: str) -> None:
    kind, why = held(name, place, ranks)
    assert kind in ("right", "refused"), f"{kind}: {why}"


BITES = {
    "a codebook in buffers": "zero 0",
    "a centre that is subtracted": "zero 2",
    "batch norm that is evaluated": "zero 1",
    "batch norm frozen half way": "zero 0, 2 micro-batches",
}


@pytest.mark.parametrize(("name", "place"), BITES.items())
def test_buffers_that_forwards_change_are_rank_0s(ranks: RankPool, name: str, place: str) -> None:
    assert held(name, place, ranks) == ("right", "")
