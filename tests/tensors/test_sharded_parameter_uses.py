"""What programs do with sharded parameters besides computing."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.tensors.sharded_parameter import ShardedParameter, disown, guard, own, unguard
from tests.tensors.whole_owner import Whole, X, plain_view

# ---- what programs do with parameters besides computing

OPTIMIZERS = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.ASGD),
    *(torch.optim.Rprop, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta),
    *(torch.optim.LBFGS, torch.optim.Adafactor),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_optimizers_are_constructed_without_asking(optimizer: type[torch.optim.Optimizer]) -> None:
    owner = Whole((3, 3))
    made = optimizer(owner.parameters, lr=0.1)  # type: ignore[call-arg]
    made.zero_grad()
    made.zero_grad(set_to_none=False)
    assert repr(made) and made.state_dict()
    assert owner.asked == []


def test_it_is_printed_without_asking() -> None:
    owner = Whole((3, 3))
    for text in (repr(owner.parameters[0]), str(owner.parameters[0])):
        assert "float32 of shape (3, 3), not gathered" in text
    assert owner.asked == []


def test_it_stays_the_same_object_of_another_class() -> None:
    owner = Whole((3, 3))
    (parameter,) = owner.parameters
    identity = id(parameter)
    module = nn.Module()
    module.weight = parameter
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ShardedParameter)
    guard(parameter)
    unguard(parameter)
    assert type(parameter) is nn.Parameter
    unguard(parameter)
    guard(parameter)
    assert type(parameter) is ShardedParameter and id(module.weight) == identity
    assert [id(p) for p in module.parameters()] == [identity]
    disown(parameter)
    assert type(parameter) is nn.Parameter and not hasattr(parameter, "_paceline_owner")


def test_a_subclass_of_parameter_is_left_alone() -> None:
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.ones(2))
    guard(parameter)
    unguard(parameter)
    assert type(parameter) is Own


def test_a_parameter_whose_owner_is_gone_is_as_it_lies_there() -> None:
    owner = Whole((2,))
    (parameter,) = owner.parameters
    del owner
    gc.collect()
    assert torch.isnan(parameter + 1).all()


def test_its_memory_is_seen_without_asking() -> None:
    owner = Whole((2,))
    assert torch.isnan(plain_view(owner.parameters[0])).all()
    assert type(plain_view(owner.parameters[0])) is Tensor and owner.asked == []


def test_an_owner_may_refuse() -> None:
    class Refuses:
        def parameter_used(self, index: int, function: str, edits: bool, shape: Any = None) -> None:
            raise ValueError(f"{function} of {index}")

    owner, parameter = Refuses(), nn.Parameter(torch.ones(2))
    own(parameter, owner, 3, parameter.stride())
    guard(parameter)
    with pytest.raises(ValueError, match="mul of 3"):
        parameter * 2
    assert type(parameter) is ShardedParameter


@pytest.mark.full
def test_compiled_functions_compute_with_its_values() -> None:
    owner = Whole((2, 3), (2,))
    weight, bias = owner.parameters
    expected = F.linear(X, *owner.values) * 2

    @torch.compile(backend="eager")
    def compute(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias) * 2

    for _ in range(2):
        assert torch.equal(compute(X), expected)
    for index, parameter in enumerate(owner.parameters):
        parameter.data = torch.full_like(owner.values[index], torch.nan)
        guard(parameter)
    owner.asked.clear()
    assert torch.equal(compute(X), expected)
    assert {index for index, _ in owner.asked} == {0, 1}


# ---- not there yet


def used_after_a_deep_copy(p: Any) -> None:
    # A sharded parameter asks for its values, by then as a plain one.
    assert torch.equal(copy.deepcopy(p) * 1, p * 1)


def differentiated(p: Any) -> None:
    loss = (X.sum() * torch.ones((), requires_grad=True)).sum()
    torch.autograd.grad(loss, [p], allow_unused=True)


ASKING: dict[str, tuple[Callable[[Any], Any], list[tuple[int, bool]]]] = {
    "a deep copy": (used_after_a_deep_copy, [(0, False)]),
    "pickle": (lambda p: pickle.loads(pickle.dumps(p)), [(0, False)]),
    "nn.Parameter": (nn.Parameter, [(0, False)]),
    "type_as": (lambda p: p.type_as(X.double()), [(0, False)]),
    "torch.func.grad": (lambda p: torch.func.grad(lambda w: (w * w).sum())(p), [(0, False)]),
    "an average of it": (lambda p: torch._foreach_lerp_([torch.ones(3, 3)], [p], 0.5), [(0, False)]),
    "out= of another": (lambda p: torch.add(p, 1, out=torch.empty(3, 3)), [(0, False)]),
    "autograd.grad": (differentiated, []),
    "format": (lambda p: f"{p}", []),
    "is_conj": (lambda p: p.is_conj(), []),
    "uniform_": (nn.init.uniform_, [(0, True)]),
    "normal_": (nn.init.normal_, [(0, True)]),
    "kaiming_uniform_": (nn.init.kaiming_uniform_, [(0, True)]),
    "constant_": (lambda p: nn.init.constant_(p, 1.0), [(0, True)]),
    "relu": (lambda p: F.relu(p, inplace=True), [(0, True)]),
}


LIMITS = {"nn.Parameter": "torch refuses subclasses"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=LIMITS[n])) if n in LIMITS else n for n in ASKING],
)
def test_these_ask_for_what_they_need_too(name: str) -> None:
    call, asks = ASKING[name]
    owner = Whole((3, 3))
    with torch.set_grad_enabled(name in ("autograd.grad", "torch.func.grad")):
        call(owner.parameters[0])
    assert owner.asked == asks
