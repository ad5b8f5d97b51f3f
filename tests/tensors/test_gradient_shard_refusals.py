"""What would take a shard of a gradient for the whole is refused, and is not where it is the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import EngineError, UserError
from paceline.tensors.gradient_shard import WHOLE, as_shard
from tests.tensors.test_gradient_shard import PARTS, VALUES, parameter, shard

REFUSED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "max": lambda g: g.max(),
    "std": lambda g: g.std(),
    "all": lambda g: g.isfinite().all(),
    "any": lambda g: torch.any(g > 0),
    "equal": lambda g: torch.equal(g, g),
    "item": lambda g: as_shard(torch.ones(1), None, PARTS).item(),
    "bool": lambda g: bool(as_shard(torch.ones(1), None, PARTS)),
    "index": lambda g: g[0],
    "slice": lambda g: g[:2],
    "assignment": lambda g: g.__setitem__(0, 1.0),
    "iteration": lambda g: list(g),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: g.numpy(),
    "view": lambda g: g.view(2, 2),
    "reshape": lambda g: g.reshape(2, 2),
    "cat": lambda g: torch.cat([g, g]),
    "stack by name": lambda g: torch.stack(tensors=[g, g]),
    "sort": lambda g: g.sort(),
    "topk": lambda g: g.topk(2),
    "cumsum": lambda g: g.cumsum(0),
    "dot": lambda g: g.dot(g),
    "matmul": lambda g: torch.zeros(2, 4) @ g,
    "softmax": lambda g: g.softmax(0),
    "a whole operand": lambda g: torch.zeros(2, 4) + g,
    "of the same size": lambda g: g * torch.ones(4),
    "in place": lambda g: g.add_(torch.ones(4)),
    "into a plain tensor": lambda g: torch.zeros(4).add_(g),
    "out=": lambda g: torch.mul(g, 2, out=torch.empty(4)),
    "another one's shard": lambda g: g + as_shard(torch.ones(1), None, PARTS),
    "copy_": lambda g: g.copy_(torch.ones(4)),
    "_foreach_copy_": lambda g: torch._foreach_copy_([g], [torch.ones(4)]),
    "_foreach_add_ to a parameter": lambda g: torch._foreach_add_([torch.zeros(4)], [g]),
    "noise": lambda g: g.add_(torch.randn(4)),
    "dropout": nn.functional.dropout,
}

NORMS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0),
    "clip_grad_norm_ one by one": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, foreach=False),
    "get_total_norm": lambda g: nn.utils.get_total_norm([g]),
    "norm": lambda g: g.norm(),
    "torch.norm": torch.norm,
    "vector_norm": torch.linalg.vector_norm,
    "linalg.norm": torch.linalg.norm,
    "of a copy": lambda g: g.clone().norm(),
    "of what was scaled": lambda g: (g / 2).norm(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_it_for_the_whole_is_refused_and_changes_nothing(name: str) -> None:
    gradient = shard()
    with pytest.raises(EngineError, match=r"of p\.grad: it holds this rank's shard"):
        REFUSED[name](gradient)
    assert torch.equal(gradient.as_subclass(Tensor), torch.tensor(VALUES))


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_refused_with_what_to_call(name: str) -> None:
    with pytest.raises(UserError, match=r"pl\.clip_grad_norm_\(model, max_norm\)"):
        NORMS[name](shard())


def test_a_norm_for_each_row_is_refused_for_the_rows_that_no_rank_has() -> None:
    with pytest.raises(EngineError, match=r"^norm of p.grad: it holds this rank's shard"):
        shard().norm(dim=0)


def test_torchs_scaler_is_refused_with_what_to_use() -> None:
    made = parameter(shard())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(UserError, match=r"use pl\.GradScaler"):
        scaler.unscale_(torch.optim.SGD([made], lr=0.1))


@pytest.mark.parametrize(
    "ask",
    [
        len,
        Tensor.numel,
        Tensor.dim,
        Tensor.size,
        lambda g: g.shape,
        lambda g: g.ndim,
        lambda g: g.shape[0],
    ],
)
def test_its_shape_is_not_taken_for_the_whole_gradients(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(EngineError, match="this rank's shard of the gradient, flat"):
        ask(shard())
    ask(shard(is_part=False))


@pytest.mark.parametrize("name", sorted((REFUSED.keys() | NORMS.keys()) - {"item", "bool", "another one's shard"}))
def test_of_a_whole_gradient_nothing_is_refused_but_waited_for(name: str) -> None:
    waits = []
    gradient = shard(lambda: waits.append(name), is_part=False)
    if name.startswith("clip_grad_norm_"):
        gradient = as_shard(torch.zeros(2, 4), lambda: waits.append(name), WHOLE)
    {**REFUSED, **NORMS}[name](gradient)
    assert waits


def test_a_number_of_its_one_element_is_refused() -> None:
    with pytest.raises(EngineError):
        float(as_shard(torch.ones(1), None, PARTS))
