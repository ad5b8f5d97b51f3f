from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.models.transformer import Transformer
from paceline.train import dynamic_loss_scale
from paceline.train.not_finite import describe_losses, marks
from tests.ranks import RankPool
from tests.train.processes import metrics, trained


@contextmanager
def forward_gives(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Iterator[None]:
    """Lets `change` see each loss in training, and how many forwards there were with it."""
    forward, calls = Transformer.forward, 0

    def changed(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += self.training
        loss = forward(self, *args, **kwargs)
        return change(loss, calls) if self.training else loss

    with patch.object(Transformer, "forward", changed):
        yield


def fails_on_rank_1() -> AbstractContextManager[None]:
    rank = pl.init().rank
    return forward_gives(lambda loss, call: loss * torch.nan if rank == 1 and call == 3 else loss)


def overflows() -> AbstractContextManager[None]:
    """Nothing in the loss, infinite in its gradient: on rank 1 in steps 2 and 4, on both in step 5."""
    when = {0: (5,), 1: (2, 4, 5)}[pl.init().rank]
    return forward_gives(lambda loss, call: loss + torch.sqrt(loss - loss.detach()) if call in when else loss)


def starts_too_high() -> AbstractContextManager[object]:
    return patch.object(dynamic_loss_scale, "FIRST", 2.0**22)


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1.5, torch.nan, torch.inf, -torch.inf])), max_size=9))
def test_one_rank_is_named_and_several_are_counted(losses: list[tuple[int, float]]) -> None:
    rows = [(0, 0, 0), *(marks(torch.tensor(loss), rank) for rank, loss in losses)]
    told = describe_losses(*(float(sum(column)) for column in zip(*rows, strict=True)))
    bad = [rank for rank, loss in losses if loss != 1.5]
    if not bad:
        assert not told
    elif len(set(bad)) == 1:
        assert told == f"the loss of rank {bad[0]} was not finite"
    else:
        assert told == f"the losses of {len(bad)} micro-batches of several ranks were not finite"


@pytest.mark.parametrize("zero", ["0", "2"])
def test_nan_on_one_rank_makes_all_skip_that_update_and_names_it(
    ranks: RankPool, nano: list[str], tmp_path: Path, zero: str
) -> None:
    flags = ["--steps", "5", "--log.every", "1", "--log.validate_every", "0", "--strategy.zero", zero]
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *flags], fails_on_rank_1)
    assert status == 0, err
    message = "the gradient is not finite (its norm is nan; the loss of rank 1 was not finite), so all ranks left this"
    assert out.count(message) == 1
    assert message.join(("step 3: ", " update out; 1 so far")) in out
    training = [line for line in metrics(tmp_path / "runs" / "latest") if "train/loss" in line]
    assert [line["train/skipped_steps"] for line in training] == [0, 0, 1, 1, 1]
    assert training[-1]["train/loss"] < training[0]["train/loss"]
    (skipped,) = map(json.loads, (tmp_path / "runs" / "latest" / "skipped.jsonl").read_text().splitlines())
    assert (skipped["step"], skipped["norm"]) == (3, None)
    assert [sum(map(len, of_rank)) for of_rank in skipped["samples"]] == [4, 4]


def test_a_gradient_that_overflows_alone_is_left_out_by_all(ranks: RankPool, nano: list[str], tmp_path: Path) -> None:
    flags = ["--steps", "6", "--log.every", "1", "--log.validate_every", "0", "--strategy.zero", "3"]
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *flags], overflows)
    assert status == 0, err
    for step in (2, 4, 5):
        why = "its norm is nan; the losses of all ranks were finite"
        assert f"step {step}: the gradient is not finite ({why}), so all ranks left" in out
    assert out.count("the gradient is not finite") == 3


@pytest.mark.full
def test_in_float16_a_loss_scale_that_is_too_high_falls_until_gradients_fit(
    ranks: RankPool, nano: list[str], tmp_path: Path
) -> None:
    flags = ["--steps", "14", "--log.every", "1", "--log.validate_every", "0", "--strategy.precision", "float16"]
    status, out, err = trained(ranks, 2, tmp_path, [*nano, *flags], starts_too_high)
    assert status == 0, err
    training = [line for line in metrics(tmp_path / "runs" / "latest") if "train/loss" in line]
    skipped = training[-1]["train/skipped_steps"]
    assert 2 <= skipped < 10, "and from then on none"
    assert [line["train/skipped_steps"] for line in training] == [min(line["step"], skipped) for line in training]
    # 2^22 for the mean over a micro-batch of 256 tokens, halved each time.
    assert training[-1]["train/loss_scale"] == 2.0 ** (22 - 8 - skipped)
    assert f"{skipped} so far; the loss scale is now {training[-1]['train/loss_scale']:g}" in out
    losses = [line["train/loss"] for line in training[int(skipped) :]]
    assert losses[-1] < losses[0]
