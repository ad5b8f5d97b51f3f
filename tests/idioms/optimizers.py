"""Optimizers: groups, several, replaced, with closures, none."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from torch import nn

from tests.idioms.side import Found, Side, fit, idiom, mlp, state


@idiom()
def learning_rates_by_depth_and_a_schedule(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    groups = [{"params": block.parameters(), "lr": 0.1 * 0.5**index} for index, block in enumerate(model)]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [g["lr"] for g in groups], total_steps=4)
    for _ in range(4):
        fit(side, net, optimizer, 1)
        schedule.step()
    return state(model)


@idiom()
def a_group_is_added_later(side: Side) -> Found:
    """The head alone first, then all."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model[-1].parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    model.zero_grad()
    optimizer.add_param_group({"params": list(model[:-1].parameters()), "lr": 0.005})
    fit(side, net, optimizer, 2)
    return state(model)


@idiom()
def an_optimizer_is_replaced(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3), 2)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), 2)
    return state(model)


@idiom()
def two_optimizers_on_parts(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    first = torch.optim.AdamW(model[:2].parameters(), 0.01, eps=1e-3)
    second = torch.optim.SGD(model[2:].parameters(), 0.1)
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()
        first.zero_grad()
    return state(model)


@idiom(
    refused=(("zero 3", "zero to 2"), ("parameter server", "all_reduce")),
    low=False,
)
def second_order_steps(side: Side) -> Found:
    """LBFGS."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, history_size=3)
    x, y = side.batch(0)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return state(model)


@idiom()
def a_step_with_a_closure(side: Side) -> Found:
    """As Lightning calls every optimizer."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        x, y = side.batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model)


BY_HAND = tuple((place, "full_parameters") for place in ("zero 3", "low", "shared parameters"))


def descended(side: Side, model: nn.Module, update: Callable[[nn.Parameter], object]) -> Found:
    """Without an optimizer."""
    net = side.parallel(model)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                update(p)
        model.zero_grad()
    return state(model)


@idiom(refused=BY_HAND)
def descent_by_hand(side: Side) -> Found:
    return descended(side, mlp(side), lambda p: p.sub_(0.1 * p.grad))


@idiom(refused=BY_HAND)
def a_learned_scale_descends_by_hand(side: Side) -> Found:
    """One number, of which some ranks have no part."""
    model = mlp(side)
    model.scale = nn.Parameter(torch.tensor(1.3, dtype=side.dtype))
    model.register_forward_hook(lambda module, given, answer: answer * module.scale)
    return descended(side, model, lambda p: p.add_(p.grad, alpha=-0.1))


@idiom(off=0.1)
def dead_neurons_begin_anew(side: Side) -> Found:
    """Some rows of a weight are written, and the optimizer forgets what it knows of them."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    with side.whole(model), torch.no_grad():
        model[0].weight[2:4] = 0.1
    states = optimizer.state[model[0].weight]
    for name in ("exp_avg", "exp_avg_sq"):
        states[name][2:4] = 0
    fit(side, net, optimizer, 2)
    return state(model)


@idiom(low=False)
def the_norm_of_moments_is_noted(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    squares = [states["exp_avg"].double().square().sum() for states in optimizer.state.values()]
    return {**state(model), "norm": torch.stack(squares).sum().sqrt()}


@idiom(off=0.1)
def the_moments_of_each_parameter_are_scaled(side: Side) -> Found:
    """Not each rank has some of each."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    for p in model.parameters():
        if optimizer.state[p]:
            optimizer.state[p]["exp_avg"].mul_(0.5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    fit(side, net, optimizer, 1)
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)
    return state(model)


@idiom(off=0.1)
def moments_are_scaled_copied_and_saved(side: Side) -> Found:
    """A restart: moments shrink, and what was saved before comes back later."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    kept = copy.deepcopy(optimizer.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for states in optimizer.state.values():
        states["exp_avg"].mul_(0.1)
        states["exp_avg_sq"] = states["exp_avg_sq"] * 0.5
    fit(side, net, optimizer, 1)
    optimizer.load_state_dict(kept)
    fit(side, net, optimizer, 1)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    fit(side, net, optimizer, 1)
    return state(model)


@idiom(refused=(("zero 3", "LBFGS .* set strategy"), ("parameter server", "LBFGS .* set strategy")), off=0.3)
def one_search_over_two_models(side: Side) -> Found:
    models = [mlp(side, seed=seed, blocks=1) for seed in range(2)]
    nets = [side.parallel(model) for model in models]
    optimizer = torch.optim.LBFGS([p for model in models for p in model.parameters()], lr=0.2, max_iter=4)
    for step in range(2):
        x, y = side.batch(step)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = (sum(net(x) for net in nets) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return {**state(models[0], "first."), **state(models[1], "second.")}


@idiom()
def a_closure_that_accumulates(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            losses = []
            for x, y in side.micro_batches(net, step):
                losses.append((net(x) - y).square().mean() / side.micro)
                losses[-1].backward()
            return torch.stack(losses).sum().detach()

        optimizer.step(closure)
    return state(model)


@idiom()
def hooks_around_a_step(side: Side) -> Found:
    """Norms that are logged before it, weights that are clamped and averaged after it."""
    model = mlp(side)
    norms, average = [], [torch.zeros_like(p) for p in model.parameters()]
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3)

    def before(*_: object) -> None:
        with side.whole(model):
            norms.extend(p.detach().norm().double() for p in model.parameters())

    def after(*_: object) -> None:
        with side.whole(model), torch.no_grad():
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.lerp_(p.clamp_(-0.2, 0.2), 0.3)

    fit(side, net, optimizer, 1)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    fit(side, net, optimizer, 3)
    return {**state(model), "norms": torch.stack(norms), **{f"{i}": kept.double() for i, kept in enumerate(average)}}


@idiom(
    refused=(
        ("zero 3", "pl.full_parameters"),
        ("low", "pl.full_parameters"),
        ("shared parameters", "pl.full_parameters"),
    )
)
def hooks_around_a_step_that_take_parameters_as_they_are(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = []
    optimizer.register_step_pre_hook(lambda *_: norms.extend(p.detach().norm().double() for p in model.parameters()))
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.2, 0.2) for p in model.parameters()])
    fit(side, net, optimizer)
    return {**state(model), "norms": torch.stack(norms)}


@idiom(refused=(("zero 3", "Adafactor may need whole parameters"),))
def second_moments_of_rows_and_columns(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, torch.optim.Adafactor(model.parameters(), 0.01), 4)
    return state(model)
