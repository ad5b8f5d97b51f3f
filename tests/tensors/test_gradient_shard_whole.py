"""What looks at all of a gradient that ranks share out finds the whole, which it is from then on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.core.errors import EngineError
from paceline.tensors.division import WHOLE, Division
from paceline.tensors.gradient_shard import GradientShard, as_shard
from paceline.tensors.transforms import follow_transforms
from tests.tensors.test_gradient_shard import PARTS, VALUES, WHOLE_VALUES, of_two_alike, parameter, shard

follow_transforms()


def whole() -> Tensor:
    return torch.tensor(WHOLE_VALUES)


def written(gradient: Tensor) -> Tensor:
    sink = io.BytesIO()
    torch.save(gradient, sink)
    sink.seek(0)
    return torch.load(sink)


def noise(gradient: Tensor) -> Tensor:
    torch.manual_seed(0)
    return gradient.add_(torch.randn_like(gradient))


READ: dict[str, Callable[[Any], Any]] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "max": lambda g: g.max(),
    "std": lambda g: g.std(),
    "all": lambda g: g.isfinite().all(),
    "any": lambda g: torch.any(g > 0),
    "equal": lambda g: torch.equal(g, g),
    "item": lambda g: (g * 2).max().item(),
    "index": lambda g: g[0],
    "slice": lambda g: g[:, :2],
    "iteration": lambda g: torch.stack(list(g)),
    "tolist": lambda g: g.tolist(),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "view": lambda g: g.view(4, 2),
    "reshape": lambda g: g.reshape(8),
    "T": lambda g: g.T,
    "real": lambda g: g.real,
    "cat": lambda g: torch.cat([g, g]),
    "stack by name": lambda g: torch.stack(tensors=[g, g]),
    "sort": lambda g: g.sort().values,
    "topk": lambda g: g.topk(2).values,
    "cumsum": lambda g: g.cumsum(0),
    "matmul": lambda g: torch.ones(3, 2) @ g,
    "softmax": lambda g: g.softmax(0),
    "a whole operand": lambda g: torch.ones(2, 4) + g,
    "broadcast": lambda g: g * torch.ones(4),
    "into a plain tensor": lambda g: torch.zeros(2, 4).add_(g),
    "out=": lambda g: torch.mul(g, 2, out=torch.empty(2, 4)),
    "_foreach_add_ to a plain tensor": lambda g: _foreach_added(torch.zeros(2, 4), g),
    "vmap": lambda g: torch.vmap(lambda row: row + row.sum())(g),
    "norm of a copy": lambda g: g.clone().norm(),
    "norm of what was scaled": lambda g: (g / 2).norm(),
    "norm of each row": lambda g: g.norm(dim=1),
    "norm": lambda g: g.norm(),
    "norm of order inf": lambda g: torch.linalg.vector_norm(g, torch.inf),
    "total norm": lambda g: nn.utils.get_total_norm([g]),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "torch.save": written,
    "copy.copy": copy.copy,
    "is_same_size": lambda g: g.is_same_size(torch.zeros(2, 4)),
}

EDITS: dict[str, Callable[[Any], Any]] = {
    "assignment": lambda g: g.__setitem__(0, 1.0),
    "a mask": lambda g: g.__setitem__(g > 1, 0.0),
    "in place": lambda g: g.add_(torch.ones(2, 4)),
    "in a row": lambda g: g[0].mul_(3),
    "in a view": lambda g: g.view(-1)[2:].zero_(),
    "copy_": lambda g: g.copy_(torch.ones(2, 4)),
    "_foreach_copy_": lambda g: torch._foreach_copy_([g], [torch.ones(2, 4)]),
    "noise": noise,
    "+= with a whole one": lambda g: g.__iadd__(torch.ones(2, 4)),
    "centred": lambda g: g.sub_(g.mean(dim=1, keepdim=True)),
    "in its data": lambda g: g.data.add_(torch.ones(2, 4)),
    "in what was detached before": lambda g: (g.detach(), g.detach().__setitem__(1, 5.0)),
    "scaled, then a row": lambda g: g.mul_(2)[1].fill_(3),
    "clipped": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0),
    "clipped one by one": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, foreach=False),
    "clipped by the largest": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, norm_type=torch.inf),
    "unscaled by torch's scaler": lambda g: _unscaled(g),
}


def _foreach_added(to: Tensor, gradient: Tensor) -> Tensor:
    torch._foreach_add_([to], [gradient])
    return to


def _unscaled(gradient: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD([parameter(gradient)], lr=0.1))


@pytest.mark.parametrize("name", READ)
def test_what_looks_at_all_of_it_finds_the_whole(name: str) -> None:
    found, wanted = READ[name](shard()), READ[name](whole())
    assert type(found) is type(wanted)
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", EDITS)
def test_what_is_written_to_the_whole_is_in_it(name: str) -> None:
    gradient, plain = shard(), whole()
    data = gradient.data
    EDITS[name](gradient)
    EDITS[name](plain)
    torch.testing.assert_close(gradient, plain)
    # Whoever has its memory still does.
    torch.testing.assert_close(data, plain)
    assert type(gradient) is Tensor and data.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("name", {**READ, **EDITS})
def test_of_a_whole_gradient_nothing_is_gathered_but_waited_for(name: str) -> None:
    waits = []
    gradient = as_shard(whole(), lambda: waits.append(name), WHOLE)
    {**READ, **EDITS}[name](gradient)
    assert waits


def test_another_ones_shard_is_whole_beside_it() -> None:
    def of_one(shards: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        return [each.as_subclass(Tensor).view(2, 4) for each in shards]

    of_another = Division("q", (2, 4), (4, 1), ((0, 8), ()), lambda: of_one)
    other = as_shard(torch.tensor(VALUES + VALUES), None, of_another)
    torch.testing.assert_close(shard() + other, 2 * whole())


@pytest.mark.parametrize(
    "ask", [len, Tensor.numel, Tensor.dim, Tensor.size, Tensor.stride, *map(attrgetter, ("shape", "ndim", "nbytes"))]
)
def test_it_tells_the_whole_ones_shape_without_being_gathered(ask: Callable[[Any], Any]) -> None:
    gradient = shard()
    assert ask(gradient) == ask(whole())
    assert type(gradient) is GradientShard


ONE = Division("scale", (), (), ((0, 1), ()), lambda: lambda shards, *_: [torch.tensor(3.0) for _ in shards])
"""Of a parameter that is one number, of which another rank has no element."""

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "a step by hand": lambda g: torch.tensor(1.0).add_(g, alpha=-0.1),
    "copied": lambda g: torch.zeros(()).copy_(g),
    "into one element": lambda g: torch.zeros(1).add_(g),
    "with one element": lambda g: torch.ones(1) * g,
    "out=": lambda g: torch.mul(g, 2, out=torch.zeros(())),
    "of a list": lambda g: torch._foreach_mul([torch.ones(()), g], 0.5)[1],
    "number": lambda g: torch.tensor(float(g)),
}


@pytest.mark.parametrize("values", [[3.0], []], ids=["its rank", "another rank"])
@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_number_every_rank_has_it(name: str, values: list[float]) -> None:
    torch.testing.assert_close(OF_ONE[name](as_shard(torch.tensor(values), None, ONE)), OF_ONE[name](torch.tensor(3.0)))


def test_of_a_list_with_a_whole_one_each_result_is_its_own() -> None:
    """As after one of them was read."""
    for place in range(3):
        given: list[Tensor] = [shard() * factor for factor in (1, 2, 3)]
        given[place] = torch.tensor([5.0])
        found = torch._foreach_mul(given, 0.5)
        wanted = [whole() * factor * 0.5 for factor in (1, 2, 3)]
        wanted[place] = torch.tensor([2.5])
        assert len(found) == 3
        for each, value in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, value)


@pytest.mark.full
@pytest.mark.parametrize("look", [lambda g: g.sum(), lambda g: g.norm(float("inf")), lambda g: g * 2 + g.sum()])
def test_what_compiled_code_looks_at_is_whole(look: Callable[[Any], Any]) -> None:
    torch.testing.assert_close(torch.compile(look, backend="eager")(shard()), look(whole()))


def test_given_other_data_it_is_that() -> None:
    gradient, given = shard(), torch.ones(2, 4)
    gradient.data = given
    assert type(gradient) is Tensor and gradient.data_ptr() == given.data_ptr()
    with pytest.raises(EngineError, match=r"p.grad.data was given a tensor of shape \[4\]"):
        shard().data = torch.ones(4)


def test_several_are_gathered_at_once() -> None:
    calls: list[int] = []

    def gather(shards: Sequence[Tensor], divisions: Sequence[Division], what: str) -> list[Tensor]:
        calls.append(len(shards))
        return of_two_alike(shards, divisions, what)

    parts = replace(PARTS, gather=lambda: gather)
    several = [as_shard(torch.tensor(VALUES), None, parts) for _ in range(3)]
    torch._foreach_add_([*several, several[0].detach()], [torch.ones(2, 4)] * 4)
    assert calls == [3]
    torch.testing.assert_close(several[0], whole() + 2)


def test_what_becomes_whole_in_inference_mode_is_written_to_outside() -> None:
    gradient = shard()
    with torch.inference_mode():
        assert gradient.sum() == whole().sum()
    gradient[0] = 1
    assert not gradient.is_inference()


def test_one_whose_model_is_gone_is_refused() -> None:
    with pytest.raises(EngineError, match=r"sum of p\.grad, this rank's shard of it: its model is gone"):
        as_shard(torch.tensor(VALUES), None, replace(PARTS, gather=lambda: None)).sum()


def test_one_with_a_graph_is_refused() -> None:
    gradient = shard()
    gradient.requires_grad_()
    with pytest.raises(EngineError, match=r"in a graph of its own: take p\.grad\.detach\(\)\.clone\(\)"):
        (gradient * 2).sum()
