"""What was `p.grad` and cannot stay it where a rank has a shard alone: it is not read as if it were the gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.buffers.loops import build, loss_of
from tests.buffers.test_held_gradients import SHARDED, its_own, one_buffer
from tests.quick import diagonal
from tests.ranks import RankPool

WORDS = "the tensor that was p.grad before backward was read or edited after it"


def told(use: Callable[[], object]) -> str:
    try:
        use()
    except EngineError as error:
        return str(error)
    return ""


def uses_of_former(strategy: Strategy, number: int) -> list[str]:
    """What is said to a loop that looks at what it made `p.grad` before the first backward, after the last."""
    world = pl.init()
    model = pl.parallelize(build(), strategy)
    held = its_own(model)
    for batch in pl.accumulate(model, list(range(number))):
        loss_of(model, batch, world.rank, world.world_size).backward()
    found = [told(gradient.norm) for gradient in held]
    pl.release(model)
    return found


@pytest.mark.parametrize(("strategy", "number"), diagonal(SHARDED, [1, 3]))
def test_reading_what_was_p_grad_is_refused(ranks: RankPool, strategy: Strategy, number: int) -> None:
    for found in ranks(2, uses_of_former, strategy, number):
        for (name, _), message in zip(build().named_parameters(), found, strict=True):
            assert message.startswith(f"{name}: {WORDS}")


def kept_share() -> str:
    """The same of a sum that was this rank's own between micro-batches."""
    world = pl.init()
    model = pl.parallelize(build(), Strategy(zero=1))
    kept: Tensor | None = None
    for batch in pl.accumulate(model, [0, 1]):
        loss_of(model, batch, world.rank, world.world_size).backward()
        if kept is None:
            kept = model[0].weight.grad  # type: ignore[index, assignment]
            assert kept.norm() > 0
    found = told(kept.norm)  # type: ignore[union-attr]
    pl.release(model)
    return found


def test_reading_a_share_that_was_reduced_since_is_refused(ranks: RankPool) -> None:
    assert all(message.startswith(f"0.weight: {WORDS}") for message in ranks(2, kept_share))


def in_one_buffer(strategy: Strategy | None, number: int) -> Tensor:
    """A loop's own buffer, of which it made every `p.grad` a view, after a backward."""
    world = pl.init()
    model: nn.Module = build() if strategy is None else pl.parallelize(build(), strategy)
    (buffer,) = one_buffer(model)
    for batch in list(range(number)) if strategy is None else pl.accumulate(model, list(range(number))):
        loss_of(model, batch, *((0, 1) if strategy is None else (world.rank, world.world_size))).backward()
    if strategy is not None:
        pl.release(model)
    return buffer.clone()


@pytest.mark.parametrize(("strategy", "number"), diagonal(SHARDED, [1, 3]))
def test_memory_of_the_loop_has_no_number_that_is_not_the_gradient(
    ranks: RankPool, strategy: Strategy, number: int
) -> None:
    expected = in_one_buffer(None, number)
    found = ranks(2, in_one_buffer, strategy, number)
    assert all(buffer.isnan().any() for buffer in found)
    for buffer in found:
        there = ~buffer.isnan()
        torch.testing.assert_close(buffer[there], expected[there], atol=1e-12, rtol=0)


def put_back(zeroes: bool) -> tuple[str, list[Tensor]]:
    """What is said, and the weights, where the loop makes its former gradients `p.grad` again in the second step."""
    world = pl.init()
    model = pl.parallelize(build(), Strategy(zero=2))
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), its_own(model)

    def train() -> None:
        for step in range(2):
            for parameter, gradient in zip(model.parameters(), held, strict=True):
                if zeroes:
                    gradient.zero_()
                parameter.grad = gradient
            loss_of(model, step, world.rank, world.world_size).backward()
            optimizer.step()

    message = told(train)
    pl.reset(model)
    weights = [value.clone() for value in model.state_dict().values()]
    pl.release(model)
    return message, weights


def plainly_put_back() -> list[Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return list(model.state_dict().values())


def test_what_was_p_grad_may_be_so_again_once_it_is_zeroed(ranks: RankPool) -> None:
    for message, weights in ranks(2, put_back, True):
        assert not message
        torch.testing.assert_close(weights, plainly_put_back(), atol=1e-12, rtol=0)
    assert all(WORDS in message for message, _ in ranks(2, put_back, False))
