"""All that an optimizer's own state_dict would have is there again, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import paceline as pl
from paceline.checkpoint.command import main
from tests.quick import diagonal, full


def model_of(dtype: torch.dtype = torch.float32, zero: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return pl.parallelize(nn.Linear(6, 3).to(dtype), pl.Strategy(zero=zero))


def steps(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    name: getattr(torch.optim, name) for name in ("Adam", "NAdam", "ASGD", "Adagrad", "Rprop", "Adadelta", "SGD")
}
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float32": torch.float32}
QUICK = {("Adam", "float64", "float32"), ("ASGD", "float64", "float32"), ("NAdam", "bfloat16", "float32")}


@pytest.mark.parametrize(("optimizer", "before", "after"), diagonal(OPTIMIZERS, DTYPES, DTYPES, quick=QUICK))
def test_states_go_on_with_parameters_of_another_dtype(
    tmp_path: Path, optimizer: type[Optimizer], before: torch.dtype, after: torch.dtype
) -> None:
    settings = {"lr": 0.01, **({"momentum": 0.9} if optimizer is SGD else {})}
    model = model_of(before)
    made = optimizer(model.parameters(), **settings)
    steps(model, made, 0, 3)
    pl.save(tmp_path / "at 3", model, made, step=3)
    expected = steps(model, made, 3, 6)
    model = model_of(after)
    made = optimizer(model.parameters(), **settings)
    pl.load(tmp_path / "at 3", model, made)
    assert steps(model, made, 3, 6) == pytest.approx(
        expected, rel=1e-5 if torch.bfloat16 not in (before, after) else 0.1
    )
    held = {state.dtype for states in made.state.values() for state in states.values() if state.dim()}
    assert held == {after}


def shared(path: Path, zero: int, saves: bool) -> dict[Any, Any]:
    model = model_of(zero=zero)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    if saves:
        steps(model, optimizer, 0, 2)
        optimizer.state["estimate"] = {"d": 0.25, "count": torch.tensor(3)}
        pl.save(path / "at 2", model, optimizer, step=2)
    else:
        optimizer.state["estimate"] = {"d": 0.0}
        pl.load(path / "at 2", model, optimizer)
    return dict(optimizer.state["estimate"])


def test_what_is_held_for_no_parameter_in_particular_goes_on(ranks, tmp_path: Path) -> None:
    ranks(2, shared, tmp_path, 1, True)
    assert ranks(3, shared, tmp_path, 0, False) == [{"d": 0.25, "count": torch.tensor(3)}] * 3
    main(["export", str(tmp_path / "at 2"), "--format", "torch", "--out", str(tmp_path / "all.pt")])
    assert torch.load(tmp_path / "all.pt")["optimizer"]["state"]["estimate"]["d"] == 0.25


def counted(path: Path, zero: int, saves: bool) -> list[float]:
    model = model_of(zero=zero)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1, lr_decay=0.1, initial_accumulator_value=0.1)
    if saves:
        steps(model, optimizer, 0, 2)
        pl.save(path / "at 2", model, optimizer, step=2)
    else:
        pl.load(path / "at 2", model, optimizer)
    return [states["step"].item() for states in optimizer.state.values()]


@pytest.mark.parametrize("zero", [1, full(3)])
def test_steps_are_counted_by_ranks_that_have_a_part(ranks, tmp_path: Path, zero: int) -> None:
    """Adagrad makes its states when it is built, of all parameters, and passes over those without a gradient."""
    assert 0.0 in ranks(3, counted, tmp_path, zero, True)[0]
    assert ranks(2, counted, tmp_path, 0, False) == [[2.0, 2.0]] * 2


def went_on_with_an_empty_parameter(path: Path, zero: int, saves: bool) -> int:
    model = nn.Linear(3, 2)
    model.prompts = nn.Parameter(torch.empty(0, 3))
    pl.parallelize(model, pl.Strategy(zero=zero))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    if saves:
        pl.save(path / "at 0", model, optimizer, step=0)
    else:
        pl.load(path / "at 0", model, optimizer)
        model(torch.ones(1, 3) + model.prompts.sum()).sum().backward()
        optimizer.step()
    return len(optimizer.state)


@pytest.mark.parametrize("zero", [1, full(3)])
def test_what_is_held_for_a_parameter_without_elements_goes_on(ranks, tmp_path: Path, zero: int) -> None:
    """No rank has a part of it, and Adagrad makes no states but when it is built."""
    ranks(2, went_on_with_an_empty_parameter, tmp_path, zero, True)
    assert ranks(2, went_on_with_an_empty_parameter, tmp_path, 0, False) == [3, 3]


@pytest.mark.parametrize("key", [3, "ema/slow"])
def test_names_that_a_checkpoint_could_not_tell_apart_are_refused(tmp_path: Path, key: Any) -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, optimizer, 0, 1)
    optimizer.state[model.weight][key] = torch.ones(3, 6)
    with pytest.raises(pl.UserError, match=f"SGD holds {key!r} for weight: name states by text without a slash"):
        pl.save(tmp_path / "at 1", model, optimizer, step=1)
    assert not list(tmp_path.iterdir())


class Counting(SGD):
    """Keeps a number beside what torch's optimizers keep."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}


class Documented(SGD):
    """Has a state_dict that adds nothing."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def hooked(parameters: Any, **settings: Any) -> SGD:
    optimizer = SGD(parameters, **settings)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "calls": 1})
    return optimizer


@pytest.mark.parametrize("kind", [Counting, hooked])
def test_a_state_dict_that_says_more_is_refused(tmp_path: Path, kind: Any) -> None:
    model = model_of()
    with pytest.raises(pl.UserError, match=r"(SGD|Counting) has a state_dict of its own, with calls, which would"):
        pl.save(tmp_path / "at 1", model, kind(model.parameters(), lr=0.1), step=1)
    assert not list(tmp_path.iterdir())


def test_a_state_dict_that_says_the_same_is_taken(tmp_path: Path) -> None:
    model = model_of()
    optimizer = Documented(model.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer, 0, 2)
    pl.save(tmp_path / "at 2", model, optimizer, step=2)
    expected = optimizer.state[model.weight]["momentum_buffer"].clone()
    other = Documented(model.parameters(), lr=0.1, momentum=0.9)
    pl.load(tmp_path / "at 2", model, other)
    assert torch.equal(other.state[model.weight]["momentum_buffer"], expected)


@pl.elementwise
class Averaging(Optimizer):
    """Updates by the mean of the last gradients, which it keeps in a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                last: list[Tensor] = self.state[parameter].setdefault("last", [])
                last.append(parameter.grad.clone())
                del last[:-3]
                parameter.sub_(sum(last), alpha=group["lr"])


def averaging(path: Path, zero: int, first: int) -> list[float] | str:
    model = model_of(torch.float64, zero)
    optimizer = Averaging(model.parameters(), 0.1)
    try:
        if first:
            pl.load(path / "at 3", model, optimizer)
        steps(model, optimizer, first, 3)
        if not first:
            pl.save(path / "at 3", model, optimizer, step=3)
    except pl.UserError as error:
        return str(error)
    return steps(model, optimizer, 3, 5)


def test_tensors_in_a_list_go_where_parameters_are_whole_and_are_refused_elsewhere(ranks, tmp_path: Path) -> None:
    for message in ranks(2, averaging, tmp_path, 1, 0):
        assert "holds last of shape [" in message and "save at zero=0" in message
    expected = ranks(2, averaging, tmp_path, 0, 0)
    assert ranks(3, averaging, tmp_path, 0, 3)[0] == pytest.approx(expected[0])
    for message in ranks(2, averaging, tmp_path, 1, 3):
        assert "Averaging's last of " in message and "load it at zero=0" in message


@pl.elementwise
class Unasking(Optimizer):
    """Counts steps, and takes every parameter to have a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


@pl.elementwise
class Derived(torch.optim.AdamW):
    """Made of torch's."""


def saved_twice(path: Path, kind: Any, saves: bool) -> list[float]:
    found: list[float] = []
    model = model_of(torch.float64, 1)
    optimizer = kind(model.parameters())
    for step in range(6):
        found += steps(model, optimizer, step, step + 1)
        if saves and step in (1, 3):
            pl.save(path / f"at {step}", model, optimizer, step=step)
            model = model_of(torch.float64, 1)
            optimizer = kind(model.parameters())
            pl.load(path / f"at {step}", model, optimizer)
    return found


@pytest.mark.parametrize("kind", [Unasking, Derived])
def test_parameters_of_which_a_rank_has_no_part_count_the_same_steps(ranks, tmp_path: Path, kind: Any) -> None:
    expected = ranks(3, saved_twice, tmp_path, kind, False)
    assert ranks(3, saved_twice, tmp_path, kind, True) == expected


def test_a_learning_rate_that_is_a_tensor_goes_on_as_one(tmp_path: Path) -> None:
    model = model_of()
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.25))
    pl.save(tmp_path / "at 0", model, optimizer, step=0)
    other = Adam(model.parameters(), lr=torch.tensor(0.5))
    pl.load(tmp_path / "at 0", model, other)
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.25))
