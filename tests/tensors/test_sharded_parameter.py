"""A parameter whose values are elsewhere: what asks for them, what is told as an edit, and what needs neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.tensors.sharded_parameter import ShardedParameter, guard, own
from tests.tensors.whole_owner import Whole, X

DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(),
    "size of a dimension": lambda p: p.size(0),
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "numel": lambda p: p.numel(),
    "len": len,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "is_cuda": lambda p: p.is_cuda,
    "is_sparse": lambda p: p.is_sparse,
    "is_meta": lambda p: p.is_meta,
    "element_size": lambda p: p.element_size(),
    "itemsize": lambda p: p.itemsize,
    "nbytes": lambda p: p.nbytes,
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "is_complex": torch.is_complex,
    "is_leaf": lambda p: p.is_leaf,
    "requires_grad": lambda p: p.requires_grad,
    "requires_grad_": lambda p: p.requires_grad_(True).requires_grad,
    "requires_grad = ": lambda p: setattr(p, "requires_grad", True),
    "grad_fn": lambda p: p.grad_fn,
    "grad": lambda p: p.grad,
    "grad = None": lambda p: setattr(p, "grad", None),
    "_version": lambda p: p._version,
    "stride": lambda p: p.stride(),
    "is_contiguous": lambda p: p.is_contiguous(),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "torch.is_tensor": torch.is_tensor,
    "new_zeros": lambda p: p.new_zeros(2).tolist(),
    "zeros_like": lambda p: torch.zeros_like(p).tolist(),
    "shape of ones_like": lambda p: torch.ones_like(p).shape,
    "result_type": lambda p: torch.result_type(p, X),
    "as a key": lambda p: {p: 1}[p],
    "is": lambda p: p is p,
}

COMPUTING: dict[str, Callable[[Any], Any]] = {
    "F.linear": lambda p: F.linear(X, p),
    "by name": lambda p: F.linear(input=X, weight=p),
    "matmul": lambda p: X @ p,
    "twice": lambda p: p @ p,
    "+": lambda p: p + 1,
    "1 +": lambda p: 1 + p,
    "==": lambda p: p == p,
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "index": lambda p: p[0],
    "iteration": lambda p: torch.stack(list(p)),
    "T": lambda p: p.T,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.tensor(p.detach().numpy()),
    "a list": lambda p: torch.cat([p, p]),
    "a tuple by name": lambda p: torch.stack(tensors=(p, p)),
    "a list in a call": lambda p: torch.einsum("ab,bc->ac", [p, p]),
    "_foreach_mul": lambda p: torch._foreach_mul([p], 2.0)[0],
    "_foreach_norm": lambda p: torch._foreach_norm([p])[0],
    "into another tensor": lambda p: torch.zeros(3, 3).copy_(p),
    "added to another": lambda p: torch.zeros(3, 3).add_(p, alpha=2),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "embedding": lambda p: F.embedding(torch.tensor([1]), p),
    "layer_norm": lambda p: F.layer_norm(X, (3,), p[0]),
    "functional_call": lambda p: torch.func.functional_call(nn.Linear(3, 3, bias=False), {"weight": p}, (X,)),
    "vmap": lambda p: torch.func.vmap(lambda row: p @ row)(X),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(torch.matmul, X, p, use_reentrant=False),
}

EDITS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "*=": lambda p: p.__imul__(2),
    "add_ another": lambda p: p.add_(torch.ones(3, 3)),
    "copy_": lambda p: p.copy_(torch.ones(3, 3)),
    "fill_": lambda p: p.fill_(1),
    "zero_": lambda p: p.zero_(),
    "assignment": lambda p: p.__setitem__(0, 1.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([0]), X),
    "torch.relu_": torch.relu_,
    "data = ": lambda p: setattr(p, "data", torch.ones(3, 3)),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(9), [p]),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 2.0),
    "out=": lambda p: torch.add(torch.ones(3, 3), 1, out=p),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "zeros_": nn.init.zeros_,
    "trunc_normal_": nn.init.trunc_normal_,
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_never_ask(name: str) -> None:
    owner = Whole((3, 3))
    (parameter,) = owner.parameters
    assert DESCRIPTIONS[name](parameter) == DESCRIPTIONS[name](nn.Parameter(owner.values[0].clone()))
    assert owner.asked == [] and type(parameter) is ShardedParameter


@pytest.mark.parametrize("name", COMPUTING)
def test_computing_asks_once_and_computes_with_the_values(name: str) -> None:
    owner = Whole((3, 3))
    found = COMPUTING[name](owner.parameters[0])
    assert owner.asked == [(0, False)]
    assert torch.equal(found, COMPUTING[name](owner.values[0]))
    assert type(found) is Tensor


@pytest.mark.parametrize("name", EDITS)
def test_editing_is_told_as_an_edit(name: str) -> None:
    # One that is refused stays as it is, so that every ask is told.
    owner = Whole((3, 3), opens=False)
    with torch.no_grad():
        EDITS[name](owner.parameters[0])
    assert (0, True) in owner.asked


def test_only_what_is_written_to_is_told_as_edited() -> None:
    owner = Whole((2,), (2,))
    first, second = owner.parameters
    with torch.no_grad():
        first.add_(second)
    assert owner.asked == [(0, True), (1, False)]
    assert first.tolist() == [2, 4] and second.tolist() == [1, 2]


def test_several_parameters_are_asked_for_one_by_one() -> None:
    owner = Whole((2, 3), (2,), (2, 2))
    weight, bias, unused = owner.parameters
    assert torch.equal(F.linear(X, weight, bias=bias), F.linear(X, owner.values[0], owner.values[1]))
    assert owner.asked == [(0, False), (1, False)]
    assert type(unused) is ShardedParameter


def test_modules_compute_with_whole_parameters() -> None:
    for module, x in (
        (nn.LSTM(3, 3), X[None]),
        (nn.MultiheadAttention(3, 1), X),
        (nn.BatchNorm1d(3).eval(), X),
        (nn.Embedding(3, 2), torch.tensor([1])),
    ):
        values = [p.detach().clone() for p in module.parameters()]
        inputs = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
        expected = module(*inputs)
        owner = Whole()
        owner.values, owner.parameters = values, list(module.parameters())
        for index, parameter in enumerate(owner.parameters):
            own(parameter, owner, index, parameter.stride())
            with torch.no_grad():
                parameter.fill_(torch.nan)
            guard(parameter)
        found = module(*inputs)
        assert torch.equal(*(r[0] if isinstance(r, tuple) else r for r in (found, expected)))
        assert sorted(owner.asked) == [(index, False) for index in range(len(values))]


def test_gradients_come_to_the_parameter_itself() -> None:
    owner = Whole((2, 3))
    (parameter,) = owner.parameters
    F.linear(X, parameter).sum().backward()
    guard(parameter)
    assert parameter.grad is not None and torch.equal(parameter.grad, X.expand(2, 3))
    assert owner.asked == [(0, False)]
