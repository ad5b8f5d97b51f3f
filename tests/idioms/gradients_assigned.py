"""Gradients that a loop makes, adds up or keeps itself, and assigns before a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state


@idiom()
def gradients_averaged_from_a_copy(side: Side) -> Found:
    """First-order meta-learning: a copy learns, and its gradients, averaged by hand, are the model's."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        learner = copy.deepcopy(model)
        (learner(x) - y).square().mean().backward()
        (net(x) * 0).sum().backward()
        for p, own in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = side.mean(own.grad).to(p.grad.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def gradients_added_up_in_a_dictionary(side: Side) -> Found:
    """Accumulation by hand: each backward's are kept and dropped, and their mean is put back."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        sums: dict[str, Tensor] = {}
        for part in range(2):
            x, y = side.batch(2 * step + part)
            (net(x) - y).square().mean().backward()
            for name, p in model.named_parameters():
                sums[name] = sums[name] + p.grad if part else p.grad.clone()
            model.zero_grad()
        for name, p in model.named_parameters():
            p.grad = sums[name] / 2
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def gradients_kept_over_a_step_are_put_back(side: Side) -> Found:
    """Before and after a forward of evaluation, in which parameters are there to compute with."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = side.batch(2 * step)
        (net(x) - y).square().mean().backward()
        kept = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        fit(side, net, optimizer, 1)
        if step:
            with torch.no_grad():
                net(x)
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(off=0.08)
def gradients_of_autograd_grad_are_assigned(side: Side) -> Found:
    model = mlp(side)
    side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        # Each rank computes those of the whole batch.
        x, y = side.tensor(8, WIDTH, seed=2 * step), side.tensor(8, 2, seed=2 * step + 1)
        loss = (model(x) - y).square().mean()
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


_SHARDS = tuple((f"zero {zero}", "its p.grad was given memory") for zero in (1, 2, 3))


def _replaced(side: Side, replace: Callable[[Tensor, Tensor], object]) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        for index, p in enumerate(model.parameters()):
            replace(p.grad, side.tensor(*p.shape, seed=index))
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(low=False)
def a_gradient_is_given_other_data(side: Side) -> Found:
    def replace(gradient: Tensor, values: Tensor) -> None:
        gradient.data = values

    return _replaced(side, replace)


@idiom(refused=_SHARDS, low=False)
def a_gradient_is_set_to_other_memory(side: Side) -> Found:
    return _replaced(side, lambda gradient, values: gradient.set_(values))


@idiom(refused=tuple((place, "the tensor that was p.grad") for place in ("zero 1", "zero 2", "zero 3", "low")))
def views_of_gradients_are_kept_and_zeroed(side: Side) -> Found:
    """In place of zero_grad, in a loop that also looks at whole gradients."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept, sums = list[Tensor](), list[Tensor]()
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        kept = kept or [p.grad.view(-1) for p in model.parameters()]
        sums += [p.grad.sum().double() for p in model.parameters()]
        optimizer.step()
        for gradient in kept:
            gradient.zero_()
    return {**state(model), "sums": torch.stack(sums)}


@idiom()
def gradients_are_halved_together_after_one_was_read(side: Side) -> Found:
    """Of a model that ends in one number, whose gradient is logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        seen.append(torch.tensor(float(gradients[-1])).double())
        for p, gradient in zip(model.parameters(), torch._foreach_mul(gradients, 0.5), strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return {**state(model), "seen": torch.stack(seen)}
