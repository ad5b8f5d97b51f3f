"""Every wait and every gate is needed: an engine that lacks one fails where collectives are late."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.strategy import Strategy
from paceline.engine.forward import ForwardPass
from paceline.executor.executor import Executor
from tests.engine import mutants
from tests.engine.late_streams import LATEST, late_streams
from tests.engine.models import make
from tests.engine.models import train as train_plainly
from tests.engine.mutants import Mutant, mutated, without, without_after
from tests.engine.test_late_streams import LATE, WORLDS, Net, assert_as_one, train
from tests.quick import some

SHARED, SERVER, HYBRID = (
    WORLDS[name][0] for name in ("zero 1, shared parameters", "parameter server", "zero 2, 2 x 2")
)
EACH = {name: replace(strategy, accumulation="each") for name, strategy in LATE.items()}
ARRIVALS = without(Executor, "require_arrived")

SLOW = 5e-3
"""Seconds by which one rank is later than the other."""

MUTANTS: dict[str, tuple[Strategy, tuple[Mutant, ...]]] = {
    # ---- waits of the caller
    "nothing waits, zero 0": (LATE["zero 0"], (without(Executor, "_wait"),)),
    "nothing waits, zero 3": (LATE["zero 3"], (without(Executor, "_wait"),)),
    "require, zero 2": (LATE["zero 2"], (without(Executor, "require"),)),
    "an evaluation waits for the update": (LATE["zero 1"], (ARRIVALS,)),
    "an evaluation waits for everyone's update of shared parameters": (SHARED, (ARRIVALS,)),
    "units wait for their gather": (LATE["zero 3"], (without_after("unshard"), ARRIVALS)),
    "gathers out of turn are waited for": (LATE["zero 3"], (mutants.gathers_out_of_turn_unwaited,)),
    "a second optimizer waits for the first one's update": (
        LATE["zero 2"],
        (without(ForwardPass, "wait_for_updates"),),
    ),
    "settle": (LATE["zero 1"], (without(Executor, "settle"),)),
    "the server's update is waited for": (SERVER, (without(Executor, "settle"),)),
    "parameters on their way ask": (LATE["zero 2"], (mutants.nothing_on_its_way,)),
    "gradients that are still reduced ask, zero 0": (EACH["zero 0"], (mutants.shards_unwaited,)),
    "gradients that are still reduced ask, zero 2": (LATE["zero 2"], (mutants.shards_unwaited,)),
    "gradients that were dropped wait": (LATE["zero 2"], (mutants.restored_unwaited,)),
    # ---- what compute ops come after
    "copy_in, zero 0": (EACH["zero 0"], (without_after("copy_in"),)),
    "copy_in, zero 2": (LATE["zero 2"], (without_after("copy_in"),)),
    "statistics": (LATE["zero 2"], (without_after("statistics"),)),
    "publish": (LATE["zero 0"], (without_after("publish"),)),
    "update of shared parameters": (SHARED, (without_after("update"),)),
    # ---- what collectives come after
    "no gate at all": (LATE["zero 0"], (mutants.ungated,)),
    "all_reduce": (LATE["zero 0"], (without_after("all_reduce", stream="reduce"),)),
    "reduce_scatter": (LATE["zero 2"], (without_after("reduce_scatter"),)),
    "the small all_reduce": (LATE["zero 0"], (without_after("all_reduce", stream="statistics"),)),
    "gather of an update": (LATE["zero 1"], (without_after("all_gather", phase="update"),)),
    "reduce to the server": (SERVER, (without_after("reduce"),)),
    "broadcast of the server": (SERVER, (without_after("broadcast"),)),
    "barrier around an update": (SHARED, (without_after("barrier"),)),
    "replicas after their shards": (HYBRID, (without_after("all_reduce", stream="replicate"),)),
    "behind another stream": (HYBRID, (mutants.not_behind,)),
}


def without_what(name: str | None, strategy: Strategy, least: float) -> dict[str, Any] | str:
    """What one rank finds with an engine that lacks something, or what it raises."""
    world, model = pl.init(), None

    def slow(kind: type[torch.optim.Adam | torch.optim.SGD]) -> Any:
        take = kind._init_group

        def take_slowly(*args: Any) -> Any:
            # Within an update: hooks around it run before it begins.
            time.sleep(world.rank * SLOW)
            return take(*args)

        return patch.object(kind, "_init_group", take_slowly)

    # What cannot be taken away is no find.
    with mutated(*(MUTANTS[name][1] if name else ())):
        try:
            # The last of a step's updates as well: each begins when all ranks have ended the one before.
            with slow(torch.optim.Adam), slow(torch.optim.SGD), late_streams(least=least):
                model = pl.parallelize(make(Net), strategy)
                if strategy.share_parameters:
                    # Ranks that share memory are not all as quick.
                    model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(world.rank * SLOW))
                found = train(model)
                pl.release(model)
                return found
        except Exception as error:
            if model is not None:
                with suppress(Exception):
                    pl.engine_of(model).program.collectives.give_up(error)  # type: ignore[union-attr]
            pl.shutdown()
            return f"{type(error).__name__}: {error}"


def goes_wrong(found: dict[str, Any] | str) -> bool:
    if isinstance(found, str):
        return True
    try:
        assert_as_one(found)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", some(MUTANTS, list(MUTANTS)[::3]))
def test_an_engine_that_lacks_it_goes_wrong(ranks, name: str) -> None:
    strategy, _ = MUTANTS[name]
    n = 4 if strategy.shard else 2
    # Later where the cores are taken, so that the collectives of a pass are not over when the next one begins; and
    # again, as a busy machine may also let what is too early come in time.
    later = (0.5, 2, 8, 0.1) * 4
    tries = (ranks(n, without_what, name, strategy, LATEST * times, timeout=10) for times in later)
    assert any(any(map(goes_wrong, outcomes)) for outcomes in tries)


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy", [LATE["zero 3"], EACH["zero 0"], SHARED], ids=["zero 3", "zero 0", "shared parameters"]
)
def test_one_that_lacks_nothing_does_not(ranks, strategy: Strategy) -> None:
    for found in ranks(2, without_what, None, strategy, LATEST, timeout=10):
        assert not isinstance(found, str), found
        assert_as_one(found)


# ---- what mends itself costs time


def unplanned(phase: str) -> int:
    """How many ops after the first step no schedule foresaw, where gathers of one phase come after nothing."""
    with mutated(*([without_after("all_gather", phase=phase)] if phase else [])), late_streams():
        model: nn.Module = pl.parallelize(make(), LATE["zero 3"])
        found = train_plainly(model)
        events = pl.engine_of(model).drain_events()
        pl.release(model)
    expected = train_plainly(make())
    assert all(torch.allclose(value, expected[0][name], atol=1e-12, rtol=0) for name, value in found[0].items())
    # What no schedule foresaw tells what it came after, too.
    assert all(event.after is not None for event in events)
    return sum(not event.planned for event in events if event.step > 0)


def test_gathers_that_overtake_are_made_again(ranks) -> None:
    assert ranks(2, unplanned, "") == [0, 0]
    for phase in ("forward", "backward"):
        assert min(ranks(2, unplanned, phase)) > 0
