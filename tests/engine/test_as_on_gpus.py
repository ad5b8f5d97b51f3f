"""Between GPUs: N ranks equal one process, and what a failure, a dropped model and an exit do there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm.gpu_streams import CudaClock
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from paceline.engine.gradients import Gradients
from paceline.plan.stages import row, shapes
from tests.comm.fake_cuda import DEVICE, FakeStream, fake_cuda
from tests.engine.as_on_gpus import as_on_gpus
from tests.engine.models import HYBRID, STAGES, assert_all_same, loss_on, make, train
from tests.quick import some


def trained(strategy: Strategy) -> tuple[list[dict], int]:
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        found = train(model)
        pl.release(model)
    return found, len(calls.groups)


CASES = {name: strategy for name, strategy in {**STAGES, **HYBRID}.items() if not strategy.share_parameters}


@pytest.mark.parametrize("name", some(CASES, ["zero 0", "zero 3"]))
def test_ranks_between_gpus_equal_one_process(ranks, name: str) -> None:
    strategy = CASES[name]
    expected = train(make())
    for found, _ in ranks(4 if strategy.shard else 2, trained, strategy):
        assert_all_same(found, expected)


def launched(strategy: Strategy, counts: tuple[int, ...]) -> list[str]:
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for seed in pl.accumulate(model, range(counts[pl.init().rank]), uneven=True):
                loss_on(model, 10 * step + seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        pl.release(model)
    return calls.submitted


UNEVEN = {
    f"{name}, {policy}": replace(strategy, accumulation=policy)
    for name, strategy in CASES.items()
    for policy in ("auto", "each", "defer", "hold")
    if policy != "hold" or strategy.gathers
}


@pytest.mark.parametrize("name", some(UNEVEN, ["zero 0, each", "zero 3, auto"]))
def test_a_rank_with_fewer_micro_batches_launches_in_the_order_of_the_others(ranks, name: str) -> None:
    strategy = UNEVEN[name]
    for counts in [(2, 1, 3, 0), (1, 2, 0, 3)] if strategy.shard else [(2, 1), (0, 3)]:
        first, *others = ranks(len(counts), launched, strategy, counts)
        assert first and all(order == first for order in others)


# ---- communicators


@pytest.mark.full
@pytest.mark.parametrize(("name", "groups"), [("zero 0", 1), ("zero 3", 2)])
def test_the_few_statistics_take_no_communicator_of_their_own(ranks, name: str, groups: int) -> None:
    assert [opened for _, opened in ranks(2, trained, STAGES[name])] == [groups, groups]
    # Beside the job's own.
    assert row(shapes(make()), STAGES[name], 2).communicators == groups + 1


# ---- what a failure leaves


def reset_and_release(strategy: Strategy) -> list[str]:
    said = []
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        loss_on(model, 0).backward()
        before = [p.grad is None for p in model.parameters()]
        with pytest.raises(EngineError) as refused:
            pl.reset(model)
        said.append(str(refused.value))
        # Refused before anything changed.
        assert [p.grad is None for p in model.parameters()] == before
        pl.engine_of(model).program.collectives.give_up(RuntimeError("a failure"))  # type: ignore[union-attr]
        if strategy.zero:
            with pytest.raises(EngineError) as refused:
                pl.release(model)
            said.append(str(refused.value))
        else:
            pl.release(model)
        assert (calls.waited, calls.ended) == (0, 0)
    return said


@pytest.mark.parametrize("name", ["zero 0", "zero 3"])
def test_a_failed_step_cannot_be_taken_back(ranks, name: str) -> None:
    for said in ranks(2, reset_and_release, STAGES[name]):
        assert all("start the job again from a checkpoint" in line for line in said)
        assert [line.partition(":")[0] for line in said] == ["pl.reset", "pl.release"][: len(said)]
        assert len(said) == (2 if name == "zero 3" else 1)


def released_in_passing(strategy: Strategy) -> tuple[str, int, int]:
    """What a loop's `finally` raises in its place, where it has raised itself; how often it waited."""
    said = ""
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        loss_on(model, 0).backward()
        try:
            try:
                raise ValueError("a broken loop")
            finally:
                pl.release(model)
        except (ValueError, EngineError) as error:
            said = str(error)
        return said, calls.waited, calls.ended


@pytest.mark.parametrize("name", ["zero 0", "zero 3"])
def test_a_loop_that_raises_is_left_without_the_other_ranks(ranks, name: str) -> None:
    for said, waited, ended in ranks(2, released_in_passing, STAGES[name]):
        assert said.startswith("pl.release: between GPUs" if name == "zero 3" else "a broken loop")
        assert (waited, ended) == (0, 0)


def reset_alone() -> bool:
    model = pl.parallelize(make())
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5, dtype=torch.float64))
    pl.reset(model)
    loss_on(model, 0).backward()
    return True


def test_one_rank_resets_as_ever(ranks) -> None:
    with as_on_gpus():
        assert reset_alone()


# ---- what a dropped model leaves


def dropped(strategy: Strategy) -> tuple[int, int, bool]:
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        loss_on(model, 0).backward()
        streams = len(pl.engine_of(model).program.collectives.streams)  # type: ignore[union-attr]
        del model
        gc.collect()
        return calls.waited, calls.ended, calls.abandon == streams


def released(strategy: Strategy) -> tuple[int, int, int]:
    with as_on_gpus() as calls:
        model = pl.parallelize(make(), strategy)
        pl.release(model)
        return calls.waited, calls.ended, calls.abandon


def test_a_dropped_model_waits_for_nobody_when_it_is_collected(ranks) -> None:
    assert ranks(2, dropped, STAGES["zero 2"]) == [(0, 0, True)] * 2


def test_a_released_one_ends_its_streams_with_the_other_ranks(ranks) -> None:
    found: list[Any] = ranks(2, released, STAGES["zero 2"])
    assert all(waited == ended == 3 and abandon == 0 for waited, ended, abandon in found)


# ---- streams


def accumulated_elsewhere(strategy: Strategy) -> list[tuple[int, int]]:
    """What waits for what before the first unit's gradients are copied in, where autograd adds on a stream of its own.

    Streams are 1: that of forward and backward; 2: that on which autograd adds to `p.grad`.
    """
    with as_on_gpus(), fake_cuda() as cuda:
        clock = CudaClock(DEVICE)
        backward, accumulators = cuda.stream(), cuda.stream()
        with cuda.on(backward), patch("paceline.engine.program.open_clock", lambda world: clock):
            model = make()
            trained = [p for p in model.parameters() if p.requires_grad]

            def becomes(stream: FakeStream) -> Callable[[torch.Tensor], None]:
                return lambda parameter: setattr(cuda, "current", stream)

            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(becomes(accumulators))
            pl.parallelize(model, strategy)
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(becomes(backward))
            loss = loss_on(model, 0)
            waited: list[tuple[int, int]] = []
            copy_in = Gradients.copy_in

            def copied(self: Gradients, indices: Iterable[int]) -> None:
                waited.extend(cuda.waits[-1:])
                copy_in(self, indices)

            with patch.object(Gradients, "copy_in", copied):
                loss.backward()
            pl.release(model)
    return waited


def test_gradients_are_copied_behind_the_stream_on_which_autograd_added_them(ranks) -> None:
    for waited in ranks(2, accumulated_elsewhere, STAGES["zero 2"]):
        assert waited and set(waited) == {(1, 2)}


def captured() -> bool:
    with as_on_gpus(), fake_cuda() as cuda:
        clock = CudaClock(DEVICE)
        with patch("paceline.engine.program.open_clock", lambda world: clock):
            model = pl.parallelize(make())
            cuda.is_capturing = True
            with pytest.raises(EngineError, match="CUDA graph"):
                model(torch.ones(3, 5, dtype=torch.float64))
            cuda.is_capturing = False
    return True


def test_a_step_is_not_captured_into_a_graph() -> None:
    assert captured()
