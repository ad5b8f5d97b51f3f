"""What one process can tell beforehand."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import UserError
from paceline.verify.model_spec import make_batches, make_model, share
from paceline.verify.prepare import _changing_buffers
from paceline.verify.reference_run import batches_file, load_tensors
from tests.verify.conftest import HERE, spec


def test_a_model_that_can_be_equal_has_no_obstacle(prepared, tmp_path) -> None:
    found = prepared(spec())
    assert (found.obstacles, found.notes, found.changing, found.micro_batches) == ((), (), (), (1, 3))
    assert found.spec == spec()
    batches = load_tensors(batches_file(tmp_path))
    assert len(batches) == 3 and batches[0][0].shape == (12, 5)


@pytest.mark.parametrize(
    ("model", "words"), [("dropout", "blocks.1.1 drop at"), ("functional_dropout", "forward draws")]
)
def test_randomness_is_explained_and_off_in_evaluation(prepared, model: str, words: str) -> None:
    (obstacle,) = prepared(spec(model)).obstacles
    assert words in obstacle and "random" in obstacle and "--eval" in obstacle and "p=0" in obstacle
    assert prepared(spec(model, evaluation=True)).obstacles == ()


def test_batch_norm_is_explained_and_fixed_in_evaluation(prepared) -> None:
    (obstacle,) = prepared(spec("batch_norm")).obstacles
    assert "blocks.1.normalise normalise over the samples" in obstacle and "--eval" in obstacle
    assert prepared(spec("batch_norm", evaluation=True)).obstacles == ()


def test_a_model_that_cannot_do_float64_runs_in_float32(prepared, tmp_path) -> None:
    found = prepared(spec("float32_only"))
    assert found.spec.dtype == "float32"
    assert "float32" in found.notes[0] and "RuntimeError" in found.notes[0]


def test_numbers_of_micro_batches_that_do_not_fit_are_left_out(prepared) -> None:
    found = prepared(spec(), micro_batches=(1, 4))
    assert found.micro_batches == (1,)
    assert found.notes == ("not with 4 micro-batches: batches of 12 samples cannot be cut so",)
    with pytest.raises(UserError, match=r"batches of 12 samples cannot be cut .* 5 ranks .* multiple of 5"):
        prepared(spec(), ranks=5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"build": "not_repeatable"}, "called twice under the same seed; the first difference is blocks.0.inner.bias"),
        ({"build": "no_such_function"}, "has no 'no_such_function'"),
        ({"data": ""}, "no batch can be made up for Net"),
        ({"loss": ""}, r"Net.forward\(tokens\) does not take a batch of 2 positional arguments. If a part"),
        ({"loss": f"{HERE}:batches"}, r"(?s)called with what the model returns, and the whole batch.*but 2 were given"),
    ],
)
def test_what_cannot_be_run_in_one_process_is_a_mistake(prepared, settings, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepared(spec(**settings))


def test_looking_puts_buffers_back() -> None:
    chosen = spec("running_mean")
    model = make_model(chosen)
    part = share(make_batches(chosen, model, 1, 12)[0], 0, 2)
    assert _changing_buffers(chosen, model, part) == ("blocks.1.mean",)
    assert torch.equal(model.get_buffer("blocks.1.mean"), torch.zeros(6, dtype=torch.float64))
