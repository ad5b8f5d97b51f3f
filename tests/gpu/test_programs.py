"""Random programs and idioms, by ranks that share a GPU, equal one process on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.devices import on_a_gpu
from tests.gpu.placed import Placed, PlacedPool
from tests.idioms.run import IDIOMS, PLACES, held
from tests.programs.program import Program, draw
from tests.programs.run import outcome

pytestmark = [*on_a_gpu, pytest.mark.filterwarnings("ignore")]

SECONDS = 120.0


@pytest.fixture(scope="module")
def pool() -> Iterator[PlacedPool]:
    pool = PlacedPool()
    pool.start(3, SECONDS)
    with Placed("cuda"):
        yield pool
    pool.close()


def drawn(count: int, **fixed: Any) -> list[Program]:
    """The first programs that a GPU can be asked for, by their number of ranks, which then stay in their job.

    GPUs share no parameters, and take no step back after an exception. Where numbers of micro-batches are unequal, one
    rank asks for the next when another has queued what it waits for: Gloo, in place of NCCL, lets its host wait there.
    """
    found = []
    for seed in range(10 * count):
        program = draw(seed, **fixed)
        if not (program.strategy.share_parameters or program.loop.fails or program.loop.way == "uneven"):
            found.append(program)
        if len(found) == count:
            break
    return sorted(found, key=lambda program: program.ranks)


def named(program: Program) -> str:
    return f"seed {program.seed}, {program.strategy.precision}"


@pytest.mark.parametrize("program", [*drawn(60), *drawn(20, precision="bfloat16")], ids=named)
def test_drawn_programs_are_right_or_refused(pool: PlacedPool, program: Program) -> None:
    found = outcome(program, pool)
    # What is refused is refused for good, so nobody can read weights afterwards.
    refused = program.lenient or program.edits_lost
    assert found.fine or (refused and "pl.reset: between GPUs" in found.why), (
        f"{found.kind}\n{program.describe()}\n{found.why}"
    )


APART = [place for place in PLACES if "shared" not in place]
ALONE = [name for name, idiom in IDIOMS.items() if idiom.against == "one"]


@pytest.mark.parametrize(("name", "place"), [(name, APART[index % len(APART)]) for index, name in enumerate(ALONE)])
def test_an_idiom_is_right_or_refused(pool: PlacedPool, name: str, place: str) -> None:
    kind, why = held(name, place, pool)
    if kind in ("left out", "INVALID"):
        pytest.skip(why or "not in low precision")
    assert kind in ("right", "refused"), f"{kind}: {why}"
