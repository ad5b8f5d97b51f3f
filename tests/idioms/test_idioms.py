"""What users write around a model is right at every stage, or refused in words; `python -m tests.idioms` runs all."""

from __future__ import annotations

import pytest

from tests.idioms.run import IDIOMS, PLACES, held, is_for
from tests.quick import pairwise
from tests.ranks import RankPool

SLOW = {"a compiled block"}

NEAR = {name: [place for place in PLACES if is_for(name, place)] for name in IDIOMS}
ONCE = {name: near[index % len(near)] for index, (name, near) in enumerate(NEAR.items())}
"""A place of each, another one in turn."""
QUICK = dict(list(ONCE.items())[::2])
"""A plain `pytest` runs every second idiom, as neighbours are akin."""


def parts(name: str, place: str) -> tuple[str, str, str]:
    """An idiom, a stage, and what is beside it."""
    stage, _, beside = place.partition(", ")
    return name, stage, beside


RARE = [place for place in PLACES if place.endswith(("parameter server", "hold", "defer"))]
"""With what may be beside an idiom at one stage alone: each idiom is at one of these, in turn."""

CASES = pairwise(
    # What is beside comes in another order for each, so that all of it is beside somewhat every stage.
    (
        parts(name, near[(place + index) % len(near)])
        for index, (name, near) in enumerate(NEAR.items())
        for place in range(len(near))
        if near[(place + index) % len(near)] not in RARE
    ),
    # Where parameters come and go within each pass.
    first=dict.fromkeys(
        parts(name, place)
        for index, (name, near) in enumerate(NEAR.items())
        for place in (ONCE[name], "zero 3", RARE[index % len(RARE)])
        if place in near
    ),
)
"""Every idiom at every stage, with all that may be beside it at several and with one that may be at one; and these with
each other. All at once are for the programs in tests/programs, which are drawn, and for `python -m tests.idioms`."""


def case(name: str, stage: str, beside: str) -> pytest.param:
    place = ", ".join(filter(None, (stage, beside)))
    marks = [] if place == QUICK.get(name) and name not in SLOW else [pytest.mark.full]
    return pytest.param(name, place, id=f"{name}: {place}", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "place"), [case(*each) for each in sorted(CASES, key=lambda each: list(IDIOMS).index(each[0]))]
)
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
