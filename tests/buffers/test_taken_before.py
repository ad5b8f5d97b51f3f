"""What was taken of parameters before `pl.parallelize` has their updates, and writes that would be lost are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.buffers.loops import STRATEGIES, build, loss_of
from tests.ranks import RankPool

WRITES: dict[str, Callable[[Tensor], object]] = {
    "an element": lambda kept: kept[3, 2].add_(1),
    "signs": lambda kept: kept.neg_(),
    "order": lambda kept: kept.copy_(kept.flip(0)),
}


def written_to_from_before(zero: int, write: str) -> str:
    """What is said of a write to `p.data` that was taken before."""
    model = build()
    kept = [parameter.data for parameter in model.parameters()]
    model = pl.parallelize(model, Strategy(zero=zero))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    WRITES[write](kept[0])
    try:
        loss_of(model, 1)
    except EngineError as error:
        return str(error)
    finally:
        pl.reset(model)
        pl.release(model)
    return ""


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_memory_that_a_parameter_has_left_is_refused(ranks: RankPool, zero: int, write: str) -> None:
    for told in ranks(2, written_to_from_before, zero, write):
        assert told.startswith("0.weight was written to by way of a tensor that was taken from it before")


def memory_before_and_after() -> tuple[bool, bool]:
    """Whether parameters stay where they are, and follow what is written there, units adopted in the order they run."""
    model = build()
    kept = [parameter.data for parameter in model.parameters()]
    model = pl.parallelize(model)
    loss_of(model, 0).backward()
    kept[0][3, 2] = 7.0
    same = all(p.data_ptr() == value.data_ptr() for p, value in zip(model.parameters(), kept, strict=True))
    return same, bool(model.state_dict()["0.weight"][3, 2] == 7)


def test_parameters_that_no_rank_reaches_stay_where_they_are(ranks: RankPool) -> None:
    assert ranks(2, memory_before_and_after) == [(True, True)] * 2


def elsewhere(parameter: Tensor) -> Tensor:
    """A shared parameter as another process has it mapped."""
    storage = torch.UntypedStorage._new_shared_fd_cpu(*parameter.untyped_storage()._share_fd_cpu_())  # type: ignore[attr-defined]
    return torch.empty(0, dtype=parameter.dtype).set_(storage).view(parameter.shape)


def as_others_see_it(strategy: Strategy | None, edited: bool) -> tuple[list[Tensor], str]:
    """What another process has of weights that it shared before, after two steps, and what is said of its edits."""
    world = pl.init()
    model = build()
    model.share_memory()
    seen = [elsewhere(parameter) for parameter in model.parameters()]
    ranks = 1 if strategy is None else world.world_size
    if strategy is not None:
        model = pl.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = ""
    try:
        for step in range(2):
            loss_of(model, step, world.rank % ranks, ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            if edited:
                seen[0][3, 2] += 1
    except EngineError as error:
        told = str(error)
    if strategy is not None:
        pl.reset(model)
        pl.release(model)
    return [weight.clone() for weight in seen], told


@pytest.mark.parametrize("name", ["zero 1", *(pytest.param(n, marks=pytest.mark.full) for n in ("zero 0", "zero 2"))])
def test_memory_shared_with_other_processes_before_has_the_updates(ranks: RankPool, name: str) -> None:
    expected, _ = as_others_see_it(None, False)
    for found, told in ranks(2, as_others_see_it, STRATEGIES[name], False):
        assert not told
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_what_another_process_writes_to_memory_that_a_parameter_has_left_is_refused(ranks: RankPool) -> None:
    for _, told in ranks(2, as_others_see_it, STRATEGIES["zero 1"], True):
        assert told.startswith("0.weight was written to")


def shared_and_sharded() -> str:
    model = build()
    model.share_memory()
    with pytest.raises(pl.UserError) as caught:
        pl.parallelize(model, Strategy(zero=3))
    pl.release(pl.parallelize(copy.deepcopy(model), Strategy(zero=3)))
    return str(caught.value)


def test_a_shared_model_is_not_sharded_but_a_copy_of_it_is(ranks: RankPool) -> None:
    assert all("other processes have its memory" in told for told in ranks(2, shared_and_sharded))


def as_arrays(zero: int) -> tuple[list[Tensor], list[Tensor]]:
    """Arrays of numpy's that were taken of parameters before, and these, after a step."""
    model = build()
    arrays = [parameter.detach().numpy() for parameter in model.parameters()]
    model = pl.parallelize(model, Strategy(zero=zero))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    found = [torch.from_numpy(array).clone() for array in arrays], [p.detach().clone() for p in model.parameters()]
    pl.release(model)
    return found


@pytest.mark.parametrize("zero", [2, pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)])
def test_arrays_taken_of_parameters_before_have_the_updates(ranks: RankPool, zero: int) -> None:
    for arrays, weights in ranks(2, as_arrays, zero):
        torch.testing.assert_close(arrays, weights, atol=0, rtol=0)
