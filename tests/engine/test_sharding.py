"""What sharding must not change: states, evaluation, copies; and what it refuses."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import paceline as pl
from paceline.comm.plan import Traffic
from paceline.comm.transport import CommunicationError
from paceline.engine.engine import Engine
from paceline.engine.progress import EngineError
from paceline.ops import Op
from paceline.strategy import Strategy
from tests.engine.models import HYBRID, SHARDED, STAGES, Stack, assert_same, data, make, sharded, shares, snapshot

# ---- stages are one computation


def delay(engine: Engine, rank: int) -> None:
    """Makes every collective come late by another time, while memory is taken and given back beside it."""
    chance = random.Random(rank)
    quick = engine.running.synchronizer.work

    def slow(op: Op, *args: Any) -> Callable[[], Traffic]:
        work = quick(op, *args)

        def later() -> Traffic:
            time.sleep(chance.uniform(0, 0.004))
            churn = [torch.full((chance.randrange(1, 4096),), torch.nan) for _ in range(8)]
            traffic = work()
            del churn
            return traffic

        return later

    engine.running.synchronizer.work = slow


def in_float32(strategy: Strategy, delayed: bool = False) -> dict:
    model = pl.parallelize(make(Stack, 24).float(), strategy)
    if delayed:
        delay(pl.engine_of(model), pl.init().rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x, y = (shares(part).float() for part in data(step, 12))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [2, 3])
def test_stages_give_the_same_bits_in_float32(ranks, n, transport) -> None:
    expected = ranks(n, in_float32, STAGES["zero 0"], transport=transport)[0]
    for strategy in SHARDED.values():
        for state in ranks(n, in_float32, strategy, transport=transport):
            assert_same(state, expected, atol=0)


@pytest.mark.parametrize("strategy", [*STAGES.values(), HYBRID["zero 3, 2 x 2"]], ids=[*STAGES, "zero 3, 2 x 2"])
def test_late_collectives_change_no_bit(ranks, strategy) -> None:
    n = 4 if strategy.shard else 2
    expected = ranks(n, in_float32, strategy)[0]
    for state in ranks(n, in_float32, strategy, True):
        assert_same(state, expected, atol=0)


def accumulated(strategy: Strategy | None) -> list[dict]:
    model = make()
    if strategy is not None:
        pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step, micro_batches in enumerate((1, 3, 2, 1)):
        x, y = data(step, 24)
        if strategy is None:
            F.mse_loss(model(x), y).backward()
        else:
            parts = zip(shares(x).chunk(micro_batches), shares(y).chunk(micro_batches), strict=True)
            for xs, ys in pl.accumulate(model, list(parts)):
                (F.mse_loss(model(xs), ys) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(snapshot(model))
    return found


POLICIES = [
    *(replace(strategy, accumulation=policy) for strategy in STAGES.values() for policy in ("each", "defer")),
    *(replace(strategy, accumulation=policy) for strategy in HYBRID.values() for policy in ("each", "defer")),
    replace(STAGES["zero 3"], accumulation="hold"),
]


@pytest.mark.parametrize("strategy", POLICIES, ids=lambda s: f"zero {s.zero} {s.accumulation} shard {s.shard}")
def test_accumulation_policies_equal_one_batch_however_many_micro_batches_a_step_has(ranks, strategy) -> None:
    expected = accumulated(None)
    for found in ranks(4 if strategy.shard else 2, accumulated, strategy):
        for state, wanted in zip(found, expected, strict=True):
            assert_same(state, wanted)


# ---- states, copies, evaluation


def stated(strategy: Strategy) -> tuple[dict, dict, dict, list[bool]]:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        x, y = (shares(part) for part in data(seed, 8))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    first = snapshot(model)
    part = {f"blocks.1.{name}": value.clone() for name, value in model.blocks[1].state_dict().items()}
    copied = copy.deepcopy(model)
    evaluated = []
    with torch.no_grad():
        x = data(5, 3)[0]
        evaluated.append(torch.equal(model(x), copied(x)))
        evaluated.append(torch.equal(model.blocks[2](x.repeat(1, 2)[:, :6]), copied.blocks[2](x.repeat(1, 2)[:, :6])))
    step(1)
    model.load_state_dict(first)
    step(1)
    again = snapshot(model)
    with pl.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    step(2)
    halved = snapshot(model)
    evaluated.append(all(torch.equal(value, first[name]) for name, value in part.items()))
    evaluated.append(all(torch.equal(value, first[name]) for name, value in copied.state_dict().items()))
    pl.release(model)
    return first, again, halved, evaluated


@sharded
def test_states_have_whole_parameters_and_what_is_loaded_or_edited_counts(ranks, strategy) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for seed in range(3):
        if seed == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        x, y = data(seed, 8)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(snapshot(model))
    for *states, evaluated in ranks(2, stated, strategy):
        for state, expected in zip(states, wanted, strict=True):
            assert_same(state, expected)
        assert evaluated == [True] * 4


def edited(strategy: Strategy, before: str) -> str:
    model = pl.parallelize(make(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    if before == "state_dict":
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.head.weight.zero_()
    what = {"forward": lambda: model(x), "step": optimizer.step, "state_dict": model.state_dict}[before]
    with pytest.raises(EngineError) as caught:
        what()
    pl.reset(model)
    model(x)
    pl.release(model)
    return str(caught.value)


@sharded
@pytest.mark.parametrize("before", ["forward", "step", "state_dict"])
def test_editing_a_piece_is_an_error_that_names_the_parameter(ranks, strategy, before) -> None:
    for message in ranks(2, edited, strategy, before):
        assert message.startswith("head.weight was edited")
        assert "pl.full_parameters(model)" in message


class Sometimes(Stack):
    """Skips a block on some ranks."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            if not (self.skips and index == 1):
                x = x + block(x)
        return self.head(x)


def skipped_on_one_rank(strategy: Strategy) -> dict:
    world = pl.init()
    model = pl.parallelize(make(Sometimes, 6, 5), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.skips = step % 2 == world.rank
        x, y = (shares(part) for part in data(step, 8))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = snapshot(model)
    pl.release(model)
    return state


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_a_block_that_only_one_rank_uses_counts_zero_for_the_other_and_hangs_nobody(ranks, strategy) -> None:
    model = make(Sometimes, 6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for rank in (0, 1):
            model.skips = step % 2 == rank
            x, y = (part[rank::2] for part in data(step, 8))
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in ranks(2, skipped_on_one_rank, strategy):
        assert_same(state, snapshot(model))


def clipped_by_torch(strategy: Strategy) -> tuple[str, float, float]:
    model = pl.parallelize(make(), strategy)
    x, y = (shares(part) for part in data(0, 8))
    F.mse_loss(model(x), y).backward()
    with pytest.raises(pl.UserError) as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    plain = make()
    F.mse_loss(plain(data(0, 8)[0]), data(0, 8)[1]).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    found = pl.clip_grad_norm_(model, 0.1).item()
    pl.release(model)
    return str(caught.value), wanted, found


@sharded
def test_torchs_clipping_is_refused_on_pieces_and_works_elsewhere(ranks, strategy) -> None:
    for message, wanted, found in ranks(2, clipped_by_torch, strategy):
        assert "pl.clip_grad_norm_(model, max_norm)" in message
        assert found == pytest.approx(wanted, rel=1e-12)


def scaled_by_torch(strategy: Strategy) -> str:
    model = pl.parallelize(make().float(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x, y = (shares(part).float() for part in data(0, 8))
    scaler.scale(F.mse_loss(model(x), y)).backward()
    with pytest.raises(pl.UserError) as caught:
        scaler.step(optimizer)
    pl.release(model)
    return str(caught.value)


@sharded
def test_torchs_gradient_scaler_is_refused_on_pieces(ranks, strategy) -> None:
    for message in ranks(2, scaled_by_torch, strategy):
        assert "use pl.GradScaler" in message


class OwnOrder(Stack):
    """Runs its blocks from the last to the first on some ranks."""

    backwards = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in list(self.blocks)[:: -1 if self.backwards else 1]:
            x = x + block(x)
        return self.head(x)


def in_own_order(strategy: Strategy) -> dict | str:
    model = make(OwnOrder)
    model.backwards = pl.init().rank == 1
    pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(3):
            x, y = (shares(part) for part in data(step, 8))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)
    except CommunicationError as error:
        return str(error)


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_ranks_that_run_units_in_another_order_each_are_equal_or_told_so(ranks, strategy) -> None:
    model = make(OwnOrder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in (0, 1):
            model.backwards = rank == 1
            x, y = (part[rank::2] for part in data(step, 8))
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = ranks(2, in_own_order, strategy, timeout=30)
    if strategy.zero < 3:
        for state in results:
            assert_same(state, snapshot(model))
    else:
        # A unit is gathered when all compute with it.
        assert any("ranks disagree" in str(message) and "blocks.0" in str(message) for message in results), results


# ---- memory


class Allocations(TorchDispatchMode):
    """Counts elements of the tensors that operations make, by whether a model's own computing makes them."""

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for tensor in torch.utils._pytree.tree_leaves(out):
            large = torch.is_tensor(tensor) and tensor.numel() >= self.largest
            if large and tensor.untyped_storage().data_ptr() not in known:
                self.found.append(str(func))
        return out


def allocated(strategy: Strategy) -> list[str]:
    model = pl.parallelize(make(Stack, 64), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[str] = []
    for step in range(3):
        x, y = (shares(part) for part in data(step, 8))
        # Autograd's own: one gradient per parameter in each backward, as without paceline.
        with Allocations(32 * 32) as mode:
            loss = F.mse_loss(model(x), y)
            model_made = len(mode.found)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step:
            found += mode.found[model_made:]
    pl.release(model)
    return found


@pytest.mark.parametrize("strategy", STAGES.values(), ids=STAGES)
def test_the_engine_allocates_nothing_after_the_first_step(ranks, strategy) -> None:
    plain = make(Stack, 64)
    x, y = data(0, 4)
    with Allocations(32 * 32) as mode:
        loss = F.mse_loss(plain(x), y)
        before = len(mode.found)
        loss.backward()
    for found in ranks(2, allocated, strategy):
        assert sorted(found) == sorted(2 * mode.found[before:])
