from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.verify.model_spec import ModelSpec, compute_loss, find, make_batches, make_model, rows_of, share
from tests.verify.conftest import HERE


def test_names_are_found_or_the_mistake_is_told() -> None:
    assert find("torch.nn:Linear", "build") is nn.Linear
    assert find("torch:nn.Linear", "build") is nn.Linear
    for reference, words in {
        "my_model": "build: expected module:name, such as my_module:build, got 'my_model'",
        "models/net.py:build": "expected module:name",
        "no_such_module:build": "there is no module 'no_such_module'",
        "torch.no_such:build": "there is no module 'torch.no_such'",
        f"{HERE}:biuld": "has no 'biuld'; did you mean build?",
    }.items():
        with pytest.raises(UserError, match=words):
            find(reference, "build")


def test_a_module_that_fails_to_import_another_shows_its_own_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        find("needs_more:build", "build")


def test_the_model_is_built_from_a_seed_in_the_dtype_and_mode_asked_for() -> None:
    one, same, other = (make_model(ModelSpec(f"{HERE}:build"), seed) for seed in (0, 0, 1))
    assert torch.equal(one.embed.weight, same.embed.weight) and not torch.equal(one.embed.weight, other.embed.weight)
    assert one.embed.weight.dtype == torch.float64 and one.training
    narrow = make_model(ModelSpec(f"{HERE}:build", dtype="float32", evaluation=True))
    assert narrow.embed.weight.dtype == torch.float32 and not narrow.training
    with pytest.raises(UserError, match=r"must return a torch.nn.Module, got type"):
        make_model(ModelSpec(f"{HERE}:not_a_module"))


FROM_A_LIST = [torch.full((4, 2), step, dtype=torch.float32) for step in range(5)]


def from_a_function(step: int) -> Tensor:
    return FROM_A_LIST[step]


def from_a_generator() -> Any:
    yield from FROM_A_LIST


@pytest.mark.parametrize("name", ["FROM_A_LIST", "from_a_function", "from_a_generator"])
def test_batches_come_from_functions_and_iterables(name: str) -> None:
    batches = make_batches(ModelSpec("", f"{__name__}:{name}"), nn.Identity(), 3, rows=0)
    assert [batch[0, 0].item() for batch in batches] == [0, 1, 2]
    assert all(batch.dtype == torch.float64 for batch in batches)


def test_too_few_batches_and_strange_ones_are_refused() -> None:
    with pytest.raises(UserError, match="gave 5 batches, but 6 steps"):
        make_batches(ModelSpec("", f"{__name__}:FROM_A_LIST"), nn.Identity(), 6, rows=0)
    with pytest.raises(UserError, match="it holds ModelSpec"):
        make_batches(ModelSpec("", f"{__name__}:ModelSpec"), nn.Identity(), 1, rows=0)
    with pytest.raises(UserError, match="no batch can be made up for Linear: give --data"):
        make_batches(ModelSpec(""), nn.Linear(1, 1), 1, rows=4)


def test_batches_are_made_up_for_models_with_a_vocabulary() -> None:
    from paceline.verify.nano import build

    model = build()
    tokens, targets = make_batches(ModelSpec(""), model, 1, rows=6)[0]
    assert tokens.shape == targets.shape == (6, 32) and tokens.max() < model.config.vocabulary
    assert not torch.equal(tokens, targets)

    @dataclass
    class Config:
        vocab_size: int = 7
        max_position_embeddings: int = 5

    class LanguageModel(nn.Module):
        config = Config()

        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any: ...

    batch = make_batches(ModelSpec(""), LanguageModel(), 1, rows=6)[0]
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"input_ids": (6, 5), "labels": (6, 5)}
    assert batch["input_ids"].max() < 7


def test_a_batch_is_shared_out_whole_and_in_order() -> None:
    batch = {"x": torch.arange(12).view(6, 2), "more": (torch.arange(6), torch.tensor(5), "word"), "none": None}
    assert rows_of(batch) == 6
    parts = [share(batch, index, 3) for index in range(3)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["more"][0] for part in parts]), batch["more"][0])
    assert all(part["more"][1] == 5 and part["more"][2] == "word" and part["none"] is None for part in parts)
    parts[0]["x"].zero_()
    assert batch["x"][1, 1] == 3
    for wrong in ({"x": torch.ones(4), "y": torch.ones(3)}, (torch.tensor(1.0),)):
        with pytest.raises(UserError, match="share their first dimension"):
            rows_of(wrong)


class Takes(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Any:
        return self.output((x * y).sum() * (1 if scale is None else scale))


@dataclass
class Output:
    loss: Tensor


@pytest.mark.parametrize("output", [lambda loss: loss, Output, lambda loss: {"loss": loss, "logits": 0}])
def test_the_loss_is_found_in_what_a_model_returns(output: Any) -> None:
    x, y = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    model = Takes(output)
    assert compute_loss(model, (x, y), None) == 6
    assert compute_loss(model, {"x": x, "y": y}, None) == 6
    assert compute_loss(model, (x, y, torch.tensor(5.0)), None) == 30


def test_with_a_loss_function_the_model_takes_what_it_requires() -> None:
    x, y, labels = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
    model = Takes(lambda value: value)
    assert compute_loss(model, (x, y, labels), lambda output, batch: output + batch[2].sum()) == 6
    named = {"x": x, "y": y, "labels": labels}
    assert compute_loss(model, named, lambda output, batch: output + batch["labels"].sum()) == 6


def test_what_is_no_loss_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    for output, words in {
        lambda loss: loss.expand(2): r"the model returned a tensor of shape \[2\]; give --loss",
        lambda loss: None: "the model returned NoneType",
        lambda loss: {"loss": loss.detach()}: r'\["loss"\] is a tensor without a graph',
    }.items():
        with pytest.raises(UserError, match=words):
            compute_loss(Takes(output), (x, x), None)
    with pytest.raises(UserError, match=r"--loss returned float$"):
        compute_loss(Takes(lambda loss: loss), (x, x), lambda output, batch: 1.0)
