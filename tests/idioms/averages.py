"""Weights that are averaged, looked ahead with, perturbed or reset between steps."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.idioms.side import Found, Side, fit, idiom, mlp, state

EDITS = (("zero 3", "full_parameters"), ("low", "full_parameters"))


@idiom()
def average_by_copy_and_lerp(side: Side) -> Found:
    model = mlp(side)
    average = copy.deepcopy(model).requires_grad_(False)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        for name, value in average.state_dict().items():
            value.lerp_(model.state_dict()[name].to(value.dtype), 0.3)
    return state(average)


@idiom(refused=(("zero 3", "k.0.weight was edited.*pl.full_parameters"),), off=0.08)
def momentum_encoder_that_its_forward_moves(side: Side) -> Found:
    # As MoCo's own code does.
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = mlp(side), mlp(side).requires_grad_(False)

        def forward(self, x):
            q = self.q(x)
            with torch.no_grad():
                for mine, theirs in zip(self.k.parameters(), self.q.parameters(), strict=True):
                    mine.data = mine.data * 0.9 + theirs.data * 0.1
                k = self.k(x)
            return q - k + 1

    model = Contrast()
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.q.parameters(), 0.1)
    fit(side, net, optimizer)
    return state(model)


@idiom()
def average_of_parameters_in_full(side: Side) -> Found:
    model = mlp(side)
    average = [p.detach().clone() for p in model.parameters()]
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with side.whole(model), torch.no_grad():
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.mul_(0.7).add_(p, alpha=0.3)
    return {f"{i}": kept.double() for i, kept in enumerate(average)}


@idiom(refused=(("zero 3", "pl.full_parameters"),), off=0.08)
def average_read_from_parameters(side: Side) -> Found:
    model = mlp(side)
    average = [p.detach().clone() for p in model.parameters()]
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.7).add_(p.data, alpha=0.3)
    return {f"{i}": kept.double() for i, kept in enumerate(average)}


@idiom(refused=(("zero 3", "taken from .* before"),), off=0.08)
def average_of_data_kept_from_before(side: Side) -> Found:
    model = mlp(side)
    kept = [p.data for p in model.parameters()]
    numbers = kept[0].numpy()
    average = [value.clone() for value in kept]
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        for mean, value in zip(average, kept, strict=True):
            mean.mul_(0.7).add_(value, alpha=0.3)
    with side.whole(model), torch.no_grad():
        next(model.parameters()).mul_(2)
    return {"numbers": torch.from_numpy(numbers.copy()).double()} | {str(i): m.double() for i, m in enumerate(average)}


@idiom()
def averaged_model_of_torch(side: Side) -> Found:
    model = mlp(side)
    average = AveragedModel(model)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with side.whole(model):
            average.update_parameters(model)
    return state(average.module)


@idiom()
def averaged_model_made_after(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with side.whole(model):
            average.update_parameters(model)
    return {**state(average.module), **state(model, "own ")}


@idiom()
def stochastic_weight_averaging(side: Side) -> Found:
    """Ends by taking the averaged weights for its own."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    total, count = {}, 0
    for step in range(4):
        fit(side, net, optimizer, 1)
        if step >= 2:
            count += 1
            for name, value in state(model).items():
                total[name] = total.get(name, 0) + value
    model.load_state_dict({name: (value / count).to(side.dtype) for name, value in total.items()})
    fit(side, net, optimizer, 1)
    return state(model)


@idiom()
def lookahead(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    with side.whole(model):
        slow = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        fit(side, net, optimizer, 1)
        if step % 2 == 1:
            with side.whole(model), torch.no_grad():
                for kept, p in zip(slow, model.parameters(), strict=True):
                    kept.add_(p - kept, alpha=0.5)
                    p.copy_(kept)
    return state(model)


@idiom(refused=EDITS)
def lookahead_by_data(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    slow = [p.detach().clone() for p in mlp(side).parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        fit(side, net, optimizer, 1)
        if step % 2 == 1:
            for kept, p in zip(slow, model.parameters(), strict=True):
                kept.add_(p.data - kept, alpha=0.5)
                p.data.copy_(kept)
    return state(model)


@idiom()
def sharpness_aware(side: Side) -> Found:
    """Two passes a step, the second at perturbed weights."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        before = state(model)
        norm = side.clip(model, 1e9)
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = -0.05 / float(norm), 0.0
        optimizer.step()
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        with side.whole(model), torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.1, 0.9
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom(
    refused=(("zero 3", "shard"), ("shared parameters", "shard")),
    low=False,
)
def sharpness_aware_by_hand(side: Side) -> Found:
    """As it is commonly written: with p.grad and p.data."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                moves.append(p.grad * (0.05 / norm))
                p.add_(moves[-1])
        model.zero_grad()
        (net(x) - y).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def the_best_weights_are_restored(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, eps=1e-3)
    best, kept = float("inf"), None
    for step in range(4):
        fit(side, net, optimizer, 1)
        model.eval()
        with torch.no_grad():
            x, y = side.batch(99)
            loss = float(side.mean((net(x) - y).square().mean()))
        model.train()
        if step == 1 or loss < 0.5 * best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return state(model)


@idiom()
def weights_and_optimizer_go_back_two_steps(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    fit(side, net, optimizer, 2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    fit(side, net, optimizer, 2)
    return state(model)
