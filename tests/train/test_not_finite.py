from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.not_finite import marks, whose, whose_gradient
from tests.train.processes import finished, metrics, torchrun

FAILS_ON_RANK_1 = """
import os, sys, torch
from paceline.cli import main
from paceline.models.transformer import Transformer

forward, calls = Transformer.forward, 0

def spoilt(self, *args, **kwargs):
    global calls
    calls += self.training
    loss = forward(self, *args, **kwargs)
    return loss * torch.nan if os.environ["RANK"] == "1" and self.training and calls == 3 else loss

Transformer.forward = spoilt
sys.exit(main(sys.argv[1:]))
"""

OVERFLOWS_ON_RANK_1 = """
import os, sys, torch
from paceline.cli import main
from paceline.models.transformer import Transformer

forward, calls = Transformer.forward, 0
WHEN = {2: "1", 4: "1", 5: "01"}

def spoilt(self, *args, **kwargs):
    global calls
    calls += self.training
    loss = forward(self, *args, **kwargs)
    if self.training and os.environ["RANK"] in WHEN.get(calls, ""):
        # Nothing in the loss, infinite in its gradient.
        return loss + torch.sqrt(loss - loss.detach())
    return loss

Transformer.forward = spoilt
sys.exit(main(sys.argv[1:]))
"""


STARTS_TOO_HIGH = """
import sys
from paceline.cli import main
from paceline.train import loss_scale

loss_scale.FIRST = 2.0**22
sys.exit(main(sys.argv[1:]))
"""


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1.5, torch.nan, torch.inf, -torch.inf])), max_size=9))
def test_one_rank_is_named_and_several_are_counted(losses: list[tuple[int, float]]) -> None:
    rows = [(0, 0, 0), *(marks(torch.tensor(loss), rank) for rank, loss in losses)]
    told = whose(*(float(sum(column)) for column in zip(*rows, strict=True)))
    bad = [rank for rank, loss in losses if loss != 1.5]
    if not bad:
        assert not told
    elif len(set(bad)) == 1:
        assert told == f"the loss of rank {bad[0]} was not finite"
    else:
        assert told == f"the losses of {len(bad)} micro-batches of several ranks were not finite"


@pytest.mark.parametrize("zero", ["0", "2"])
def test_nan_on_one_rank_makes_all_skip_that_update_and_names_it(nano: list[str], tmp_path: Path, zero: str) -> None:
    (tmp_path / "spoilt.py").write_text(FAILS_ON_RANK_1)
    flags = ["--steps", "5", "--log.every", "1", "--log.validate_every", "0", "--strategy.zero", zero]
    status, out, err = finished(torchrun(2, "spoilt.py", "train", *nano, *flags), tmp_path)
    assert status == 0, err
    message = "the gradient is not finite (its norm is nan; the loss of rank 1 was not finite), so all ranks left this"
    assert out.count(message) == 1
    assert message.join(("step 3: ", " update out; 1 so far")) in out
    training = [line for line in metrics(tmp_path / "runs" / "latest") if "train/loss" in line]
    assert [line["train/skipped_steps"] for line in training] == [0, 0, 1, 1, 1]
    assert training[-1]["train/loss"] < training[0]["train/loss"]


@pytest.mark.parametrize("zero", ["3"])
def test_a_gradient_that_overflows_alone_is_named_when_it_happens_again(
    nano: list[str], tmp_path: Path, zero: str
) -> None:
    (tmp_path / "spoilt.py").write_text(OVERFLOWS_ON_RANK_1)
    flags = ["--steps", "6", "--log.every", "1", "--log.validate_every", "0", "--strategy.zero", zero]
    status, out, err = finished(torchrun(2, "spoilt.py", "train", *nano, *flags), tmp_path)
    assert status == 0, err
    told = "the losses of all ranks were finite"
    assert f"step 2: the gradient is not finite (its norm is nan; {told}), so all ranks left" in out
    assert f"step 4: the gradient is not finite (its norm is nan; {told}, the gradient of rank 1 was not), so" in out
    assert f"step 5: the gradient is not finite (its norm is nan; {told}, the gradients of 2 ranks were not), so" in out
    assert out.count("the gradient is not finite") == 3


@pytest.mark.parametrize(
    ("culprits", "told"),
    [
        ((-2, 0), "the losses of all ranks were finite"),
        ((0, 0), "the losses of all ranks were finite, and their gradients before they were summed"),
        ((1, 3), "the losses of all ranks were finite, the gradient of rank 3 was not"),
        ((2, 3), "the losses of all ranks were finite, the gradients of 2 ranks were not"),
    ],
)
def test_whose_gradient_it_was(culprits: tuple[float, float], told: str) -> None:
    assert whose_gradient(*culprits) == told


def test_in_float16_a_loss_scale_that_is_too_high_falls_until_gradients_fit(nano: list[str], tmp_path: Path) -> None:
    (tmp_path / "high.py").write_text(STARTS_TOO_HIGH)
    flags = ["--steps", "14", "--log.every", "1", "--log.validate_every", "0", "--strategy.precision", "float16"]
    status, out, err = finished(torchrun(2, "high.py", "train", *nano, *flags), tmp_path)
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
