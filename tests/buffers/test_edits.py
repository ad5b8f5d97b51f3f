"""Edits by way of `p.data` that would be lost are refused: at once on CPUs, one call later on a GPU."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.buffers.edits import Edits
from paceline.comm.read_later import ReadLater
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy
from tests.buffers.loops import refused_in


@contextmanager
def gpu_memory() -> Iterator[None]:
    """Inside, what is compared is taken for a GPU's."""
    with patch("paceline.buffers.edits._asks_later", lambda memory: True):
        yield


def test_what_was_handed_in_comes_back_one_call_later_as_it_was() -> None:
    later, values = ReadLater(), torch.ones(2)
    assert later.exchange(values) is None
    values.fill_(2)
    first = later.exchange(values)
    values.fill_(3)
    second = later.exchange(values)
    assert first is not None and second is not None
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_host_learns_of_an_edit_when_it_asks_the_next_time(dtype: torch.dtype) -> None:
    memory = torch.zeros(12, dtype=dtype)
    parameters = [nn.Parameter(memory[:5]), nn.Parameter(memory[5:])]
    with gpu_memory():
        edits = Edits(parameters, {0: memory[:5], 1: memory[5:]})
    edits.set()
    assert edits.found() is None and edits.found() is None
    parameters[1].data.fill_(1)
    assert edits.found() is None
    # Whatever an update makes of it meanwhile.
    edits.set()
    assert edits.found() == 1
    assert edits.found() is None


def edited(zero: int) -> tuple[int, str]:
    """In which step an edit in the second one was refused, and what was said."""
    with gpu_memory():
        torch.manual_seed(0)
        model = pl.parallelize(nn.Linear(4, 2), Strategy(zero=zero, precision="bfloat16"))  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters())

        def edit() -> None:
            for parameter in model.parameters():
                parameter.data.mul_(0.9)

        return refused_in(model, optimizer, lambda _: model(torch.ones(3, 4)).float().square().mean(), edit)


@pytest.mark.parametrize("zero", [0, 1])
def test_it_is_refused_in_the_next_step(ranks, zero: int) -> None:
    for step, said in ranks(2, edited, zero):
        assert step == 2 and "was edited, but this rank updates" in said


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("moment", ["before the forward", "before the update"])
def test_one_of_a_few_elements_is_refused_in_the_update(ranks, zero: int, moment: str) -> None:
    for step, said in ranks(2, edited_in_part, zero, moment):
        assert step == 1 and "0.weight was edited, but this rank updates" in said


def edited_in_part(zero: int, moment: str) -> tuple[int, str]:
    """In which step an edit of an element or a row in the second one is refused, and what is said then."""
    torch.manual_seed(0)
    strategy = Strategy(zero=zero, precision="bfloat16")  # type: ignore[arg-type]
    model = pl.parallelize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)), strategy)
    optimizer = torch.optim.AdamW(model.parameters())

    def edit() -> None:
        # In each rank's shard. All elements are compared if parameters were taken between steps.
        columns = slice(5, 6) if moment == "before the forward" else slice(None)
        model[0].weight.data[[2, 61], columns] = 7.0

    def loss_in(step: int) -> torch.Tensor:
        if step == 1 and moment == "before the forward":
            edit()
        return model(torch.ones(3, 64)).float().square().mean()

    return refused_in(model, optimizer, loss_in, edit if moment == "before the update" else lambda: None)


class Followed(nn.Module):
    """A layer, and another that follows it in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.learns, self.teaches = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.teaches.weight.data
        if self.step == 1:
            weight.mul_(0.9)
        self.step += 1
        return self.learns(x) - self.teaches(x)


def edited_in_forward(on_gpus: bool) -> tuple[int, str]:
    """In which step an edit in the second one's forward was refused, and what was said."""
    with gpu_memory() if on_gpus else nullcontext():
        model = pl.parallelize(Followed(), Strategy(zero=3))
        optimizer = torch.optim.SGD(model.learns.parameters(), lr=0.1)
        return trained(model, optimizer, lambda: model(torch.ones(3, 4)).square().mean())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> tuple[int, str]:
    """In which step an edit in the second one's forward is refused, and what is said then. Releases the model."""
    said = -1, ""
    for step in range(5):
        try:
            loss_of().backward()
            optimizer.step()
        except (EngineError, pl.CommunicationError) as error:
            # Of a rank whose shard it is, or of one that waits for it.
            said = step, str(error)
            pl.reset(model)
            break
        optimizer.zero_grad()
    pl.release(model)
    return said


@pytest.mark.parametrize("on_gpus", [False, True])
def test_one_of_what_a_forward_gathered_outside_of_its_unit_is_refused(ranks, on_gpus: bool) -> None:
    steps, said = zip(*ranks(2, edited_in_forward, on_gpus), strict=True)
    assert min(steps) == 1 + on_gpus and all("teaches.weight was edited" in each for each in said)


class Units(nn.Module):
    """Two blocks, the first of which is edited inside its forward in the second step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.step += 1
        return x


def edited_in_its_unit(width: int) -> tuple[int, str]:
    """In which step an edit of a parameter in its unit's forward is refused, and what is said then."""
    torch.manual_seed(0)
    model = pl.parallelize(Units(width), Strategy(zero=3, units=("blocks.*",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def edit(block: nn.Linear, args: object) -> None:
        if model.step == 1:
            block.weight.data[-1, -1] = 7.0

    model.blocks[1].register_forward_pre_hook(edit)
    return trained(model, optimizer, lambda: model(torch.ones(3, width)).square().mean())


@pytest.mark.parametrize("width", [3, 200])
def test_one_inside_its_unit_is_refused_by_name_when_that_is_resharded(ranks, width: int) -> None:
    # Of a small bucket all elements are compared, of a large one some, among which is each parameter's last.
    told = ranks(2, edited_in_its_unit, width)
    assert any(step == 1 and "blocks.1.weight was edited" in said for step, said in told), told


def shared(is_waited_for: bool) -> dict[str, str]:
    """What is said of a model that is shared between two steps, there or by what uses it next."""
    told = {}
    uses: dict[str, Callable[[nn.Module], object]] = {
        "forward": lambda model: model(torch.ones(1, 4)),
        "state_dict": lambda model: model.state_dict(),
        "release": pl.release,
    }
    for name, use in uses.items():
        model = pl.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), Strategy(zero=1, bucket_mb=1e-4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_waited_for:
            pl.engine_of(model).settle()
        try:
            model.share_memory()
            use(model)
        except EngineError as error:
            told[name] = str(error)
    pl.shutdown()
    return told


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_parameters_moved_out_of_their_buffers_are_refused_whatever_uses_them(ranks, is_waited_for: bool) -> None:
    for told in ranks(2, shared, is_waited_for):
        assert list(told) == ["forward", "state_dict", "release"]
        assert all("as model.share_memory() does" in said for said in told.values())


def evaluated_after_sharing() -> tuple[bool, str]:
    """Whether an evaluation of what was shared before its updates came is right, and what was said."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    alone, x = copy.deepcopy(model), torch.ones(3, 64)
    said = ""
    pl.parallelize(model, Strategy(zero=1, bucket_mb=1e-4))
    for each in (alone, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        each(x).square().mean().backward()
        optimizer.step()
    try:
        # The first layer's is read, so that this does not wait.
        model[0].weight.sum(), optimizer.zero_grad()
        model.share_memory()
        with torch.no_grad():
            right = torch.allclose(model(x), alone(x), rtol=1e-4)
    except EngineError as error:
        right, said = False, str(error)
    pl.shutdown()
    return right, said


def test_what_is_evaluated_once_it_was_shared_has_its_updates(ranks) -> None:
    for right, said in ranks(2, evaluated_after_sharing):
        assert right or "as model.share_memory() does" in said


@pl.elementwise
class Grows(torch.optim.Optimizer):
    """Puts one element more in the place of what it is given."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = torch.zeros(parameter.numel() + 1)


def put_in_place(zero: int) -> tuple[int, str]:
    """In which step data of another shape is refused, and what is said then."""
    model = pl.parallelize(nn.Sequential(nn.Linear(4, 2)), Strategy(zero=zero))  # type: ignore[arg-type]
    return trained(model, Grows(model.parameters()), lambda: model(torch.ones(3, 4)).square().mean())


@pytest.mark.parametrize("zero", [1, 3])
def test_data_of_another_shape_in_the_place_of_a_shard_is_refused(ranks, zero: int) -> None:
    for step, said in ranks(2, put_in_place, zero):
        assert step == 0 and re.search(r"0\.(weight|bias): the optimizer put data of shape \[\d+\] in the place", said)
