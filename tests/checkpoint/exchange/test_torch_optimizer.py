"""Whole states of one process's optimizer and those of a sharded one are the same states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.checkpoint.exchange.torch_optimizer import to_checkpoint
from paceline.core.errors import UserError
from paceline.core.strategy import Strategy
from tests.checkpoint.training import built, everything, steps
from tests.engine.models import STAGES, assert_same
from tests.quick import full
from tests.train.processes import called

ROUNDING = 1e-9
"""Of float64, where updates divide by roots of small squares."""


def named_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """As `optimizer_of` makes it, of parameters with their names."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "lr": 0.02},
    ]
    kind = getattr(torch.optim, name)
    return kind(groups, lr=0.01, **({"amsgrad": True} if name == "AdamW" else {}))


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


def in_one_process(path: Path, name: str) -> dict[str, Tensor]:
    """Three steps without paceline, `torch.save`, three more; returns what these gave."""
    model = built()
    optimizer = named_optimizer(model, name)
    scheduler = scheduled(optimizer)
    steps(model, optimizer, scheduler, 0, 3)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({**{what: each.state_dict() for what, each in states.items()}, "step": 3}, path)
    return everything(model, steps(model, optimizer, scheduler, 3, 6))


def parallel(strategy: Strategy, name: str) -> tuple[nn.Module, Any, Any]:
    model = pl.parallelize(built(), strategy)
    optimizer = named_optimizer(model, name)
    return model, optimizer, scheduled(optimizer)


def goes_on(folder: Path, strategy: Strategy, name: str) -> dict[str, Tensor]:
    """From a checkpoint of three steps, with a model and an optimizer that have done something else."""
    model, optimizer, scheduler = parallel(strategy, name)
    steps(model, optimizer, scheduler, 7, 8)
    assert pl.load(folder, model, optimizer, scheduler=scheduler).step == 3
    return everything(model, steps(model, optimizer, scheduler, 3, 6))


def saves(folder: Path, strategy: Strategy, name: str) -> None:
    model, optimizer, scheduler = parallel(strategy, name)
    steps(model, optimizer, scheduler, 0, 3)
    pl.save(folder, model, optimizer, step=3, scheduler=scheduler)


def goes_on_in_one_process(path: Path, name: str) -> dict[str, Tensor]:
    state = torch.load(path, weights_only=True)
    model = built()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = named_optimizer(model, name)
    scheduler = scheduled(optimizer)
    for what, each in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        each.load_state_dict(state[what])
    assert state["step"] == 3
    return everything(model, steps(model, optimizer, scheduler, 3, 6))


@pytest.mark.parametrize("name", ["AdamW", full("SGD"), full("Adagrad"), full("NAdam")])
def test_one_processes_states_go_on_at_every_stage_and_back(ranks, tmp_path: Path, name: str) -> None:
    (expected,) = ranks(1, in_one_process, tmp_path / "plain.pt", name)
    flags = ("--out", "imported", "--optimizer", name)
    assert called(tmp_path, "checkpoint", "import", "plain.pt", *flags)[0] == 0
    for stage in ("zero 0", "zero 3"):
        for found in ranks(2, goes_on, tmp_path / "imported", STAGES[stage], name):
            assert_same(found, expected, ROUNDING)
        ranks(2, saves, tmp_path / stage, STAGES[stage], name)
        status, _, err = called(tmp_path, "checkpoint", "export", stage, "--format", "torch", "--out", f"{stage}.pt")
        assert (status, err) == (0, "")
        (found,) = ranks(1, goes_on_in_one_process, tmp_path / f"{stage}.pt", name)
        assert_same(found, expected, ROUNDING)
    # What was exported comes in again, and is the same to the bit.
    assert called(tmp_path, "checkpoint", "import", "zero 3.pt", "--out", "again", "--optimizer", name)[0] == 0
    assert called(tmp_path, "checkpoint", "export", "again", "--format", "torch", "--out", "again.pt")[0] == 0
    assert_identical(*(torch.load(tmp_path / f"{path}.pt", weights_only=True) for path in ("zero 3", "again")))


def assert_identical(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_identical(mine, theirs)
    elif isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and one.equal(other)
    else:
        assert one == other


# ---- which parameter a number stands for


class Twins(nn.Module):
    """Parameters of the same shapes, a tied one and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def stepped(model: nn.Module, groups: Any) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """An optimizer whose states tell parameters apart, and what each should be, by name."""
    optimizer = torch.optim.Adam(groups, lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer, {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}


def found(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    values, tensors = to_checkpoint(0, "Adam", optimizer.state_dict(), model.state_dict(), lambda tensor: "")
    assert values["kind"] == "Adam" and all("step" in state for state in values["states"].values())
    return {tensor.name.split("/")[1]: tensor.read() for tensor in tensors if tensor.name.endswith("/exp_avg")}


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: model.parameters(),
        lambda model: [
            {"params": [p for p in model.parameters() if p.dim() < 2]},
            {"params": [p for p in model.parameters() if p.dim() > 1]},
        ],
        lambda model: reversed(list(model.named_parameters())),
    ],
    ids=["all", "by shape", "named"],
)
def test_numbers_get_the_names_of_their_parameters(groups: Any) -> None:
    model = Twins()
    optimizer, expected = stepped(model, groups(model))
    assert_same(found(model, optimizer), expected, atol=0)


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: [{"params": [*model.b.parameters()]}, {"params": [*model.a.parameters()]}],
        lambda model: [model.a.weight, model.a.bias],
        lambda model: [model.a.weight, model.b.weight, model.a.bias],
    ],
    ids=["in either of two groups", "some", "all but one"],
)
def test_what_may_belong_to_several_is_refused(groups: Any) -> None:
    model = Twins()
    optimizer = torch.optim.Adam(groups(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(UserError, match="may belong to the weights in more ways than one"):
        found(model, optimizer)


def test_states_of_older_releases_count_steps_as_numbers() -> None:
    model = nn.Linear(2, 2)
    optimizer, _ = stepped(model, model.parameters())
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["step"] = int(each["step"])
    values, _ = to_checkpoint(0, "Adam", state, model.state_dict(), lambda tensor: "")
    assert values["states"]["weight"]["step"] == {"$scalar": ["float32", 1.0]}


def broken(change: str) -> dict[str, Any]:
    """What hostile files may hold."""
    ones: dict[str, Any] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2)}
    state: dict[str, Any] = {"state": {0: ones}, "param_groups": [{"lr": 1.0, "params": [0], "param_names": ["w"]}]}
    group = state["param_groups"][0]
    match change:
        case "groups":
            state["param_groups"] = 3
        case "params":
            group["params"] = [[0]]
        case "twice":
            group["params"] = [0, 0]
        case "unknown":
            group["param_names"] = ["other"]
        case "stray":
            state["state"][7] = ones
        case "shard":
            group["paceline_shard"] = [0, 2]
        case "code":
            group["foreach"] = print
        case "huge":
            ones["exp_avg"] = torch.zeros(1).expand(10**7, 10**5)
    return state


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("groups", "not as torch writes them: Expected `array`"),
        ("params", "not as torch writes them"),
        ("twice", "name a parameter twice"),
        ("unknown", "is there for other, which is no parameter"),
        ("stray", "is there for 7, which is no parameter"),
        ("shard", "are one rank's shard"),
        ("code", "foreach is a builtin_function"),
        ("huge", "says to have 1,000,000,000,000 elements"),
    ],
)
def test_what_is_no_optimizers_state_is_refused(change: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        to_checkpoint(0, "Adam", broken(change), {"w": torch.ones(2, 2)}, lambda tensor: "")


def test_states_that_are_not_there_are_said(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    status, _, err = called(tmp_path, "checkpoint", "import", "w.pt", "--out", "new", "--optimizer", "AdamW")
    assert status == 2 and "holds the states of no optimizers" in err and not (tmp_path / "new").exists()


def test_of_several_optimizers_each_is_named(tmp_path: Path) -> None:
    model = Twins()
    named = [[(f"{part}.{name}", p) for name, p in getattr(model, part).named_parameters()] for part in "ab"]
    made = [torch.optim.Adam(named[0]), torch.optim.SGD(named[1], momentum=0.9)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in made:
        optimizer.step()
    torch.save({"model": model.state_dict(), "a": made[0].state_dict(), "b": made[1].state_dict()}, tmp_path / "w.pt")
    status, _, err = called(tmp_path, "checkpoint", "import", "w.pt", "--out", "new", "--optimizer", "Adam")
    assert status == 2 and "holds the states of 2 optimizers" in err
    assert called(tmp_path, "checkpoint", "import", "w.pt", "--out", "new", "--optimizer", "Adam", "SGD")[0] == 0
    parallel = pl.parallelize(Twins())
    mine = [torch.optim.Adam(parallel.a.parameters()), torch.optim.SGD(parallel.b.parameters(), momentum=0.5)]
    pl.load(tmp_path / "new", parallel, mine)
    assert mine[1].state[parallel.b.weight]["momentum_buffer"].eq(1).all()
    assert mine[0].state[parallel.a.bias]["exp_avg"].equal(made[0].state[model.a.bias]["exp_avg"])
    pl.release(parallel)
    flags = ("--format", "torch", "--out", "out.pt")
    assert called(tmp_path, "checkpoint", "export", "new", *flags)[0] == 0
    assert called(tmp_path, "checkpoint", "import", "out.pt", "--out", "back", "--optimizer", "Adam", "SGD")[0] == 0
