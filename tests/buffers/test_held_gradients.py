"""What a loop keeps of `p.grad` and edits after each backward is what the optimizer is given, as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.buffers.flat_gradients import FlatGradients
from paceline.buffers.held_gradients import HeldGradients
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.buffers.loops import STRATEGIES, build, gpu_memory, loss_of, refused_in
from tests.quick import diagonal
from tests.ranks import RankPool


def kept(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def detached(model: nn.Module) -> list[Tensor]:
    return [gradient.detach() for gradient in kept(model)]


def its_own(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return kept(model)


def one_buffer(model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view(parameter.shape)
    return [buffer]


Hold = Callable[[nn.Module], list[Tensor]]
AFTER: dict[str, Hold] = {"backward's": kept, "backward's, detached": detached}
BEFORE: dict[str, Hold] = {"its own": its_own, "one buffer": one_buffer}
PLACES = [*AFTER, *BEFORE]
ZEROED = ("by the loop", "by the optimizer")


def micro_batches(model: nn.Module, ranks: int, number: int) -> Iterator[int]:
    return iter(range(number)) if ranks == 1 else pl.accumulate(model, list(range(number)))


def train(
    model: nn.Module, place: str, number: int, zeroed: str, rank: int = 0, ranks: int = 1, share: float = 1.0
) -> dict[str, Tensor]:
    """Halves what is held after each backward, and scales it once more before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = BEFORE[place](model) if place in BEFORE else []
    for step in range(4):
        for batch in micro_batches(model, ranks, number):
            (share * loss_of(model, step * number + batch, rank, ranks)).backward()
            held = held or AFTER[place](model)
            for gradient in held:
                gradient.mul_(0.5)
        for gradient in held:
            gradient.mul_(3.0)
        optimizer.step()
        if zeroed == "by the loop":
            for gradient in held:
                gradient.zero_()
        else:
            optimizer.zero_grad(set_to_none=False)
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained(strategy: Strategy, place: str, number: int, zeroed: str, on_gpus: bool) -> dict[str, Tensor]:
    with gpu_memory() if on_gpus else nullcontext():
        world = pl.init()
        model = pl.parallelize(build(), strategy)
        share = 1 / world.world_size if strategy.gradients == "sum" else 1.0
        state = train(model, place, number, zeroed, world.rank, world.world_size, share)
        pl.release(model)
    return state


WHOLE = {name: strategy for name, strategy in STRATEGIES.items() if not strategy.stage}
WHOLE["zero 0, sum"] = Strategy(bucket_mb=1e-4, gradients="sum")
WHOLE["zero 0, defer"] = Strategy(accumulation="defer")


@pytest.mark.parametrize(("name", "number", "place"), diagonal(WHOLE, [1, 3], PLACES))
@pytest.mark.parametrize("zeroed", ZEROED)
def test_edits_of_held_gradients_count(ranks: RankPool, name: Strategy, number: int, place: str, zeroed: str) -> None:
    expected = train(build(), place, number, zeroed)
    for state in ranks(2, trained, name, place, number, zeroed, False):
        torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("place", PLACES)
def test_edits_count_where_memory_does_not_move(ranks: RankPool, place: str) -> None:
    expected = train(build(), place, 3, ZEROED[0])
    for name in ("zero 0", "zero 0, each"):
        for state in ranks(2, trained, WHOLE[name], place, 3, ZEROED[0], True):
            torch.testing.assert_close(state, expected, atol=1e-12, rtol=0)


# ---- where a shard, or another dtype, takes the place of what was there

SHARDED = {name: strategy for name, strategy in STRATEGIES.items() if strategy.stage}
SHARDED["zero 3, hold"] = Strategy(zero=3, accumulation="hold")


def trained_or_refused(strategy: Strategy, place: str, number: int, zeroed: str) -> dict[str, Tensor] | str:
    world = pl.init()
    model = pl.parallelize(build(), strategy)
    try:
        return train(model, place, number, zeroed, world.rank, world.world_size)
    except EngineError as error:
        return str(error)
    finally:
        pl.reset(model)
        pl.release(model)


@pytest.mark.parametrize(("name", "number", "place"), diagonal(SHARDED, [1, 3], PLACES))
@pytest.mark.parametrize("zeroed", ZEROED)
def test_edits_of_what_shards_replace_count_or_are_refused(
    ranks: RankPool, name: Strategy, number: int, place: str, zeroed: str
) -> None:
    expected = train(build(), place, number, zeroed)
    for found in ranks(2, trained_or_refused, name, place, number, zeroed):
        if isinstance(found, str):
            assert place in BEFORE or number > 1, found
            assert "the tensor that was p.grad before backward was read or edited after it" in found
        else:
            assert place in AFTER
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def by_numpy(gradient: Tensor) -> None:
    gradient.numpy()[...] *= 0.5


EDITS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda gradient: gradient.mul_(0.5),
    "by data": lambda gradient: gradient.data.mul_(0.5),
    "by numpy": by_numpy,
}


def edited_in_the_second_step(zero: int, edit: str) -> tuple[int, str]:
    """In which step that is refused, and what is said."""
    model = pl.parallelize(build(), Strategy(zero=zero))  # type: ignore[arg-type]
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), its_own(model)
    return refused_in(model, optimizer, lambda step: loss_of(model, step), lambda: EDITS[edit](held[0]))


@pytest.mark.parametrize(("zero", "edit"), diagonal([1, 2, 3], list(EDITS)))
def test_an_edit_is_refused_however_and_whenever_it_is_made(ranks: RankPool, zero: int, edit: str) -> None:
    for step, told in ranks(2, edited_in_the_second_step, zero, edit):
        assert step == 1 and told.startswith(
            "0.weight: the tensor that was p.grad before backward was read or edited after it"
        )


def zeroed_with_it(strategy: Strategy | None, place: str) -> list[Tensor]:
    """A loop that zeroes its own tensors and `p.grad` between steps, whichever of them that is."""
    model = build() if strategy is None else pl.parallelize(build(), strategy)
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), BEFORE[place](model)
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        for gradient in held:
            gradient.zero_()
        optimizer.zero_grad(set_to_none=False)
    weights = [value.clone() for value in model.state_dict().values()]
    if strategy is not None:
        pl.release(model)
    return weights


@pytest.mark.parametrize(("strategy", "place"), diagonal(SHARDED, list(BEFORE)))
def test_what_was_p_grad_may_be_zeroed_with_what_is(ranks: RankPool, strategy: Strategy, place: str) -> None:
    expected = [zeroed_with_it(None, place)] * 2
    torch.testing.assert_close(ranks(2, zeroed_with_it, strategy, place), expected, atol=1e-12, rtol=0)


def low_loss_of(model: nn.Module, seed: int, rank: int, ranks: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return (model(x.chunk(ranks)[rank]).float() - 1).square().mean()


def in_low(zero: int, number: int, keeps: bool) -> list[Tensor]:
    """The weights of a loop that edits what it kept of the first backward, or asks for gradients after each."""
    world = pl.init()
    model = pl.parallelize(build().float(), Strategy(zero=zero, precision="bfloat16"))
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for step in range(4):
        for batch in pl.accumulate(model, list(range(number))):
            low_loss_of(model, step * number + batch, world.rank, world.world_size).backward()
            held = held if held and keeps and zero == 0 else kept(model)
            for gradient in held:
                gradient.mul_(0.5)
        held = held if held and keeps else kept(model)
        for gradient in held:
            gradient.mul_(3.0)
        optimizer.step()
        for gradient in held:
            gradient.zero_()
        if not keeps:
            held.clear()
    with pl.full_parameters(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    pl.release(model)
    return weights


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.full)])
def test_edits_of_held_gradients_count_in_low_precision(ranks: RankPool, zero: int, number: int) -> None:
    expected = ranks(2, in_low, zero, number, False)
    torch.testing.assert_close(ranks(2, in_low, zero, number, True), expected, atol=1e-6, rtol=1e-6)


def in_another_dtype() -> str:
    model = pl.parallelize(build().float(), Strategy(precision="bfloat16"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = its_own(model)
    low_loss_of(model, 0, 0, 1).backward()
    held[0].mul_(0.5)
    with pytest.raises(EngineError) as caught:
        optimizer.step()
    pl.reset(model)
    pl.release(model)
    return str(caught.value)


def test_edits_of_gradients_in_another_dtype_are_refused(ranks: RankPool) -> None:
    for told in ranks(2, in_another_dtype):
        assert told.startswith("0.weight: the tensor that was p.grad before backward was read or edited after it")


def held_of_nothing(strategy: Strategy, number: int) -> int:
    """How many gradients are taken for held by a loop that keeps none."""
    model, found = pl.parallelize(build(), strategy), 0
    optimizer, earlier = torch.optim.SGD(model.parameters(), lr=0.1), HeldGradients.begin

    def begin(self: HeldGradients, flat: FlatGradients, gradients: Mapping[int, Tensor]) -> None:
        nonlocal found
        earlier(self, flat, gradients)
        found += len(self._tensors)

    with patch.object(HeldGradients, "begin", begin):
        for step in range(4):
            for batch in pl.accumulate(model, list(range(number))):
                loss_of(model, step * number + batch).backward()
            pl.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    pl.release(model)
    return found


@pytest.mark.parametrize(("strategy", "number"), diagonal({**WHOLE, **SHARDED}, [1, 3]))
def test_a_loop_that_keeps_no_gradients_holds_none(ranks: RankPool, strategy: Strategy, number: int) -> None:
    assert ranks(2, held_of_nothing, strategy, number) == [0, 0]
