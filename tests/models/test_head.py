from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.models.head import Head


def head_of(weight: torch.Tensor) -> Head:
    head = Head(weight.shape[1], weight.shape[0]).to(weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    return head


@given(
    rows=st.integers(1, 12),
    vocabulary=st.integers(1, 40),
    scale=st.floats(0.01, 200),
    upstream=st.floats(-3, 3),
    seed=st.integers(0, 2**20),
)
@settings(deadline=None, max_examples=50)
def test_loss_and_gradients_equal_torchs(rows: int, vocabulary: int, scale: float, upstream: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = head_of(torch.randn(vocabulary, 5, generator=generator).double())
    x = (scale * torch.randn(rows, 5, generator=generator).double()).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = -100

    expected = F.cross_entropy(F.linear(x, head.weight), targets, reduction="sum", ignore_index=-100)
    gradients = torch.autograd.grad(expected * upstream, (x, head.weight))
    loss = head(x, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    for mine, theirs in zip(torch.autograd.grad(loss * upstream, (x, head.weight)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [8, 13, 17])
def test_rows_of_logits_are_aligned_and_gradients_are_of_the_weights_shape(dtype: torch.dtype, vocabulary: int) -> None:
    head = head_of(torch.randn(vocabulary, 32).to(dtype))
    x, targets = torch.randn(5, 32).to(dtype).requires_grad_(), torch.tensor([0, vocabulary - 1, -100, 3, 1])
    loss = head(x, targets)
    (columns,) = {
        kept.shape[1] for kept in loss.grad_fn.saved_tensors if kept.shape[0] == 5 and kept.shape[1] not in (1, 32)
    }
    loss.backward()
    assert columns * x.itemsize % 16 == 0 and vocabulary <= columns < vocabulary + 16
    assert head.weight.grad is not None and head.weight.grad.shape == head.weight.shape
    expected = F.cross_entropy(x.detach().double() @ head.weight.detach().double().t(), targets, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=0.03 if x.itemsize == 2 else 1e-5)


def test_loss_stays_finite_where_the_targets_probability_underflows() -> None:
    head = head_of(torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[500.0]], requires_grad=True)
    loss = head(x, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 1000
    assert x.grad.item() == 2


def test_backward_can_run_twice_over_a_retained_graph() -> None:
    head, targets = head_of(torch.randn(7, 5)), torch.tensor([3, -100, 6])
    x = torch.randn(3, 5, requires_grad=True)
    loss = head(x, targets)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)


@pytest.mark.parametrize("target", [-1, 7])
def test_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head_of(torch.randn(7, 5))(torch.randn(1, 5), torch.tensor([target]))


def test_frozen_weight_gets_no_gradient_and_inputs_still_do() -> None:
    head = head_of(torch.randn(7, 5)).requires_grad_(False)
    x = torch.randn(2, 5, requires_grad=True)
    head(x, torch.tensor([1, 2])).backward()
    assert head.weight.grad is None
    assert x.grad.count_nonzero() > 0
