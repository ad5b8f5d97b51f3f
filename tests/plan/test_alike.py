from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.plan.alike import Alike, arguments
from paceline.plan.trace import trace


def alike(first: nn.Module, second: nn.Module) -> bool:
    model = nn.ModuleList([first, second])
    tells = Alike(model)
    return tells.module("0", first) == tells.module("1", second)


def test_blocks_are_alike_by_all_that_shapes_can_depend_on() -> None:
    assert alike(nn.Linear(3, 4), nn.Linear(3, 4))
    assert not alike(nn.Linear(3, 4), nn.Linear(4, 3))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4, bias=False))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False))
    assert not alike(nn.Linear(3, 4), nn.Linear(3, 4).eval())
    assert not alike(nn.Dropout(0.1), nn.Dropout(0.2))
    assert not alike(nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU()))


def test_a_block_that_shares_a_parameter_is_like_no_other() -> None:
    shared, own = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([shared, own, nn.Sequential(shared)])
    tells = Alike(model)
    assert tells.module("0", shared) != tells.module("1", own)


def test_a_forward_or_hook_of_ones_own_tells_blocks_apart() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.forward = lambda x: x  # type: ignore[assignment, method-assign]
    assert not alike(first, second)
    third = nn.Linear(3, 3)
    third.register_forward_hook(lambda *_: None)
    assert not alike(nn.Linear(3, 3), third)


def test_calls_are_alike_by_shapes_and_values() -> None:
    x = torch.ones(2, 3)
    assert arguments((x,), {"causal": True}) == arguments((x + 1,), {"causal": True})
    assert arguments((x,), {}) != arguments((x.t(),), {})
    assert arguments((x, 1), {}) != arguments((x, 2), {})
    assert arguments((x, 1), {}) != arguments((x, True), {})
    assert arguments((x,), {}) != arguments((x.requires_grad_(),), {})


class Blocks(nn.Module):
    """Blocks whose work depends on a number that each holds."""

    def __init__(self, idx: list[int], attribute: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Chooses(index, attribute) for index in idx)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Chooses(nn.Module):
    def __init__(self, index: int, attribute: str) -> None:
        super().__init__()
        setattr(self, attribute, index)
        self.attribute = attribute
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if getattr(self, self.attribute) % 3 == 2:
            y = self.linear(y)
        return y


@pytest.mark.parametrize("attribute", ["layer_idx", "every"])
def test_blocks_that_differ_by_a_number_of_their_own_are_traced_each(attribute: str) -> None:
    """Whether it is their place among their like or any other."""
    work = trace(Blocks(list(range(20)), attribute), 4, inputs=torch.empty(4, 16))
    counts = [sum(each.count for each in unit.forward if each.kind == "matmul") for unit in work.units[:20]]
    assert counts == [2 if index % 3 == 2 else 1 for index in range(20)]


@pytest.mark.parametrize("known", [True, False])
def test_known_blocks_that_are_alike_run_once_for_all_of_them(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    ran: list[int] = []
    own = Chooses.forward

    def counted(self: Chooses, x: Tensor) -> Tensor:
        ran.append(1)
        return own(self, x)

    monkeypatch.setattr(Chooses, "forward", counted)
    if known:
        monkeypatch.setattr(Chooses, "__module__", "transformers.models.made_up")
    many, few = Blocks([0] * 40, "every"), Blocks([0] * 3, "every")
    long = trace(many, 4, inputs=torch.empty(4, 16))
    # The first, whose input has no gradient, two that have, and the last.
    assert len(ran) == (4 if known else 40)
    short = trace(few, 4, inputs=torch.empty(4, 16))
    assert [unit.flops for unit in long.units[1:40]] == [short.units[1].flops] * 39
    assert [unit.kept for unit in long.units[:2]] == [unit.kept for unit in short.units[:2]]


@pytest.mark.parametrize("reads", [True, False])
def test_known_blocks_that_read_their_place_run_each(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    ran: list[int] = []

    def forward(self: Chooses, x: Tensor) -> Tensor:
        ran.append(1)
        y: Tensor = self.linear(x)
        return self.linear(y) if reads and 9 <= self.layer_idx <= 12 else y

    monkeypatch.setattr(Chooses, "forward", forward)
    monkeypatch.setattr(Chooses, "__module__", "transformers.models.made_up")
    model = Blocks(list(range(20)), "layer_idx")
    work = trace(model, 4, inputs=torch.empty(4, 16))
    assert len(ran) == (20 if reads else 4)
    counts = [sum(each.count for each in unit.forward if each.kind == "matmul") for unit in work.units[:20]]
    assert counts == [2 if reads and 9 <= index <= 12 else 1 for index in range(20)]
    assert {type(block) for block in model.blocks} == {Chooses}


class Partly(nn.Module):
    """Blocks alike, around which gradients are recorded or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.how != "lowest":
            x = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.how == "lowest":
                with torch.set_grad_enabled(index >= 8):
                    x = block(x)
            elif self.how == "middle" and 4 <= index < 8:
                with torch.no_grad():
                    y = block(x)
                x = x + y
            else:
                x = block(x.detach() if self.how == "detached" and index in (4, 5, 6, 9) else x)
        return x.square().mean()


@pytest.mark.parametrize("how", ["lowest", "middle", "detached"])
def test_blocks_alike_may_have_no_gradients(how: str) -> None:
    x = torch.randn(8, 32)
    with FlopCounterMode(display=False) as counter:
        Partly(how)(x).backward()
    assert trace(Partly(how), 8, inputs=x, device="cpu").flops == pytest.approx(counter.get_total_flops())
