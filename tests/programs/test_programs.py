"""Whatever is right under DDP is right at every stage, or refused where it may be, before weights are wrong.

`python -m tests.programs --count 1000` looks for more; `--peer ddp` shows what DDP makes of the same programs.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.programs.named import HOLES, NEAREST
from tests.programs.program import Program, draw
from tests.programs.run import outcome

DRAWN = {f"seed {seed}": draw(seed) for seed in (*range(60), 160, 366, 1249, 1328, 1380, 1409, 1667, 3126)}
"""Among the last: units that run in another order than they lie in, a backward of weights alone before the first
forward, and a gradient without elements on some ranks when the second of two optimizers steps."""

QUICK = {*NEAREST, *list(DRAWN)[:5], *list(DRAWN)[60:]}
"""What a plain `pytest` runs of these; a full run, all."""

LOW = {f"seed {seed}": draw(seed, precision="bfloat16") for seed in (74, 104, 130, 156, 178, 268)}
"""In order: edits that are refused, graphs from before gradients were shown in float32 (104 and 156), and what enlarges
rounding errors."""

BEYOND_DDP = ("two forwards, two backwards", "two backwards of one graph")
"""DDP reduces what the first of two backward passes leaves, and not the second's."""

WITH_DDP = {
    name.removesuffix(": zero 0"): program
    for name, program in HOLES.items()
    if name.endswith(": zero 0") and program.loop.way != "uneven"
}


def by_ranks(programs: dict[str, Program], quick: Collection[str] = QUICK) -> pytest.MarkDecorator:
    """Those of as many ranks follow each other, as ranks then stay in their job."""
    chosen = sorted(programs.items(), key=lambda named: named[1].ranks)
    return pytest.mark.parametrize(
        "program",
        [pytest.param(program, id=name, marks=() if name in quick else pytest.mark.full) for name, program in chosen],
    )


def assert_fine(program: Program, ranks, peer: str = "paceline") -> None:
    found = outcome(program, ranks, peer)
    assert found.fine, f"{found.kind}\n{program.describe()}\n{found.why}"


@by_ranks(HOLES)
def test_what_users_write_is_right_or_refused(ranks, program) -> None:
    assert_fine(program, ranks)


@pytest.mark.filterwarnings("ignore")
@by_ranks(DRAWN)
def test_drawn_programs_are_right_or_refused(ranks, program) -> None:
    assert_fine(program, ranks)


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_gather_what_others_do_not_are_told(ranks) -> None:
    assert_fine(draw(20129), ranks)


@pytest.mark.filterwarnings("ignore")
@by_ranks(LOW, ("seed 74", "seed 104", "seed 156"))
def test_drawn_programs_in_low_precision_are_right_or_refused(ranks, program) -> None:
    assert_fine(program, ranks)


@by_ranks({name: program for name, program in WITH_DDP.items() if name not in BEYOND_DDP}, list(WITH_DDP)[::4])
def test_the_reference_computes_what_ddp_does(ranks, program) -> None:
    assert_fine(program, ranks, peer="ddp")


def test_a_seed_gives_the_same_program_again() -> None:
    assert draw(7) == draw(7) and draw(7).describe() == draw(7).describe()
    assert draw(7, zero=2).strategy.zero == 2 and draw(7, zero=2).loop == draw(7).loop
