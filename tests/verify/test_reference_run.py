"""The reference is what everything else is held against, so it is held against the plainest loop there is."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.errors import UserError
from paceline.verify.model_spec import make_batches, make_model
from paceline.verify.recipe import EPS, LEARNING_RATE, Recipe
from paceline.verify.reference_run import batches_file, load_tensors, save_tensors, step_file, train_reference
from tests.verify import user_models
from tests.verify.conftest import HERE, spec

STEPS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = spec()
    save_tensors(batches_file(tmp_path), make_batches(model, make_model(model), STEPS, 0))
    return tmp_path


@pytest.mark.parametrize("recipe", [Recipe(2, 3, STEPS), Recipe(4, 1, STEPS), Recipe(4, 3, STEPS, each=True, group=2)])
def test_parts_of_a_batch_train_as_the_whole_batch(folder: Path, recipe: Recipe) -> None:
    train_reference(spec(), recipe, folder)
    model = make_model(spec())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    for step in range(STEPS):
        batch = user_models.batches(step)
        loss = user_models.cross_entropy(model(batch[0]), batch)
        loss.backward()
        record = load_tensors(step_file(folder, recipe, step))
        assert sum(record["losses"]) / len(record["losses"]) == pytest.approx(loss.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(record["weights"][name], parameter.detach(), rtol=0, atol=1e-13)
            assert (name in record["gradients"]) == (parameter.grad is not None)
            if parameter.grad is not None:
                torch.testing.assert_close(record["gradients"][name], parameter.grad, rtol=0, atol=1e-13)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert record["norm"] == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()


def test_in_low_precision_copies_compute_and_fp32_weights_are_updated(folder: Path) -> None:
    narrow = spec(dtype="float32")
    recipe = Recipe(1, 1, STEPS, "bfloat16")
    train_reference(narrow, recipe, folder)
    master = make_model(narrow)
    optimizer = torch.optim.AdamW(master.parameters(), lr=LEARNING_RATE, eps=EPS)
    for step in range(STEPS):
        low, batch = copy.deepcopy(master).bfloat16(), user_models.batches(step)
        user_models.cross_entropy(low(batch[0]), batch).backward()
        record = load_tensors(step_file(folder, recipe, step))
        for (name, parameter), computed in zip(master.named_parameters(), low.parameters(), strict=True):
            assert record["weights"][name].dtype == torch.float32 and torch.equal(record["weights"][name], parameter)
            parameter.grad = None if computed.grad is None else computed.grad.float()
        optimizer.step()
    assert math.isinf(recipe.max_norm)


def test_a_loss_that_is_no_number_leaves_nothing_to_compare(folder: Path) -> None:
    with pytest.raises(UserError, match=r"step 0 has the losses \[nan, nan\]"):
        train_reference(spec(loss=f"{HERE}:no_number"), Recipe(2, 1, STEPS), folder)


def test_what_is_read_survives_that_it_is_written_again(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.pt", [torch.zeros(100_000)])
    before = load_tensors(tmp_path / "a.pt")[0]
    save_tensors(tmp_path / "a.pt", [torch.ones(1)])
    assert before.shape == (100_000,) and not before.any()


def test_references_of_different_recipes_have_their_own_folders() -> None:
    one = Recipe(2, 3, STEPS)
    others = [
        replace(one, **change) for change in ({"ranks": 4}, {"precision": "float16"}, {"each": True}, {"group": 2})
    ]
    assert len({recipe.name for recipe in (one, *others)}) == 5
