"""The norm of a whole gradient, asked of a shard: known, or once the shard was edited that of the gathered one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.tensors.gradient_shard import GradientShard, as_shard
from paceline.tensors.reduced_norm import ReducedNorm, forget_norms, norm_of, norms_of, scaling
from tests.tensors.test_gradient_shard import IN_PLACE, PARTS, VALUES, WHOLE_VALUES, parameter

WHOLE_NORM = 9.25


def shard(values: list[float] = VALUES, dtype: torch.dtype = torch.float32, whole: float = WHOLE_NORM) -> GradientShard:
    """As a backward publishes it."""
    memory = torch.tensor(values, dtype=dtype)
    own = norms_of([memory], memory.device)[0]
    return as_shard(memory, None, PARTS, ReducedNorm(own, torch.tensor(whole, dtype=torch.float64)))


ASKED: dict[str, Callable[[Any], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 2": lambda g: g.norm(2),
    "norm by name": lambda g: g.norm(p=2),
    "torch.norm": lambda g: torch.norm(g, 2.0),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, 2.0),
    "linalg.norm": torch.linalg.norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "linalg.norm by Frobenius": lambda g: torch.linalg.norm(g, "fro"),
    "of a detached one": lambda g: g.detach().norm(2),
    "of its data": lambda g: g.detach().data.norm(2),
    "_foreach_norm": lambda g: torch._foreach_norm([g], 2)[0],
    "get_total_norm": lambda g: nn.utils.get_total_norm([g]),
    "clip_grad_norm_": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0),
    "clip_grad_norm_ one by one": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, foreach=False),
    "clip_grad_norm_, finite": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, error_if_nonfinite=True),
}

OTHERS: dict[str, Callable[[Any], Any]] = {
    "of order 1": lambda g: g.norm(1),
    "of order inf": lambda g: g.norm(math.inf),
    "of some dimension": lambda g: g.norm(dim=0),
    "in another dtype": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "into other memory": lambda g: torch.norm(g, out=torch.zeros(())),
    "largest singular value": lambda g: torch.linalg.norm(g, 2),
    "largest singular value of a matrix": lambda g: torch.linalg.matrix_norm(g, 2),
    "nuclear": lambda g: torch.linalg.matrix_norm(g, "nuc"),
    "of order inf, clipped": lambda g: nn.utils.clip_grad_norm_([parameter(g)], 1.0, norm_type=math.inf),
    "of a copy": lambda g: g.clone().norm(),
    "of another gradient": lambda g: (2 * g).norm(),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_the_whole_gradients(name: str, dtype: torch.dtype) -> None:
    found = ASKED[name](shard(dtype=dtype))
    assert type(found) is Tensor and found.dtype == dtype and found.dim() == 0
    assert found.item() == WHOLE_NORM


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms_are_those_of_the_gathered_one(name: str) -> None:
    torch.testing.assert_close(OTHERS[name](shard()), OTHERS[name](torch.tensor(WHOLE_VALUES)))


def test_clipping_scales_the_shard_by_the_whole_norm() -> None:
    gradient = shard()
    nn.utils.clip_grad_norm_([parameter(gradient)], 0.5)
    torch.testing.assert_close(gradient.as_subclass(Tensor), torch.tensor(VALUES) * 0.5 / WHOLE_NORM)


def test_norms_of_several_count_each() -> None:
    gradients = [shard(whole=3.0), shard([], whole=4.0), torch.full((3, 4), 1.0)]
    assert nn.utils.get_total_norm(gradients).item() == pytest.approx(math.sqrt(9 + 16 + 12))


@pytest.mark.parametrize("edit", IN_PLACE)
@pytest.mark.parametrize(
    "through", [lambda g: g, lambda g: g.detach(), lambda g: g.data], ids=["itself", "detach", "data"]
)
def test_of_an_edited_one_it_is_gathered(edit: str, through: Callable[[Any], Any]) -> None:
    for gradient in (shard(), shard([]), shard([0.0] * len(VALUES))):
        # On a rank that has none of its elements, too.
        IN_PLACE[edit](through(gradient))
        assert norm_of(gradient) is None
        own = gradient.as_subclass(Tensor)
        torch.testing.assert_close(gradient.norm(), torch.cat([own, own]).norm())


def test_where_it_was_edited_past_its_functions_its_own_norm_tells() -> None:
    gradient = shard()
    with torch._C.DisableTorchFunctionSubclass():
        gradient.mul_(2)
    for _ in range(2):
        assert norm_of(gradient) is None
        with torch._C.DisableTorchFunctionSubclass():
            # Known no more, even as it was before.
            gradient.div_(2)


def test_what_steps_or_clips_forgets_it() -> None:
    gradient = shard([])
    forget_norms([gradient, torch.ones(3)])
    assert norm_of(gradient) is None and norm_of(gradient.data) is None


def test_what_is_told_is_the_callers_own() -> None:
    gradient = shard(dtype=torch.float64)
    gradient.norm().mul_(2)
    assert gradient.norm().item() == WHOLE_NORM


@pytest.mark.parametrize("read", [lambda g: g * 2, lambda g: g.isfinite(), lambda g: g.requires_grad_(False), repr])
def test_who_only_reads_changes_nothing(read: Callable[[Any], Any]) -> None:
    gradient = shard()
    read(gradient)
    assert gradient.norm().item() == WHOLE_NORM


def test_squares_that_float32_does_not_have() -> None:
    found = norms_of([torch.full((4,), 1e30), torch.tensor([math.inf]), torch.ones(4)], torch.device("cpu"))
    assert found.tolist() == [pytest.approx(2e30), math.inf, 2.0]


def test_one_that_is_not_finite_tells_so() -> None:
    gradient = shard([math.nan, 1.0], whole=math.nan)
    assert gradient.norm().isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([parameter(gradient)], 1.0, error_if_nonfinite=True)


def test_multiplied_by_all_ranks_it_goes_on_and_an_edit_before_that_does_not() -> None:
    factor = torch.tensor([0.25])
    gradient, edited = shard(), shard()
    edited.mul_(2)
    with torch._C.DisableTorchFunctionSubclass(), scaling([gradient, edited], factor):
        torch._foreach_mul_([gradient, edited], 0.25)
    assert gradient.norm().item() == WHOLE_NORM / 4
    assert norm_of(edited) is None


def test_norms_of_tensors_of_several_dtypes_are_in_order() -> None:
    tensors = [torch.ones(4), torch.full((9,), 2.0, dtype=torch.float64), torch.zeros(0), torch.ones(16).bfloat16()]
    found = norms_of(tensors, torch.device("cpu"))
    assert found.dtype == torch.float64 and found.tolist() == [2.0, 6.0, 0.0, 4.0]
    assert norms_of([], torch.device("cpu")).shape == (0,)
