"""Clipping, as loops write it."""

from __future__ import annotations

import torch

from tests.idioms.side import Found, Side, idiom, mlp, state


@idiom()
def clipping_by_value(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def clipping_by_torch(side: Side) -> Found:
    """With the norm of each parameter's gradient noted before, and gradients that are kept as zeros or dropped."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norms = {}
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        each = [p.grad.detach().data.norm(2).double() for p in model.parameters() if p.grad is not None]
        norms[f"norm of {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach().double()
        norms[f"norms of {step}"] = torch.stack(each)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return {**state(model), **norms}


@idiom(refused=(("zero 3", "after the step's forward has begun"),))
def clipping_by_torch_with_a_regulariser_before_the_forward(side: Side) -> Found:
    """Gradients that come before their units run are reduced once more."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        weights = sum(p.square().sum() for p in model.parameters())
        ((net(x) - y).square().mean() + 0.01 * weights).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def clipping_by_torch_of_a_model_called_twice(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x, y = side.batch(step)
        apart = (net(x) - net(2 * x)).square().mean() if step != 1 else 0.0
        (apart + (net(x) - y).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def clipping_by_torch_after_micro_batches(side: Side) -> Found:
    """Two models' gradients at once, summed without a word to the engine."""
    models = [mlp(side), mlp(side, outputs=1)]
    nets = [side.parallel(model) for model in models]
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    norms = {}
    for step in range(3):
        for half in range(2):
            x, y = side.batch(2 * step + half)
            ((nets[0](x) - y).square().mean() + nets[1](x).square().mean()).div(2).backward()
        norms[f"norm of {step}"] = torch.nn.utils.clip_grad_norm_(parameters, 0.1).detach().double()
        optimizer.step()
        optimizer.zero_grad()
    return {**state(models[0]), **{f"other {name}": each for name, each in state(models[1]).items()}, **norms}


@idiom(off=0.1)
def clipping_by_group(side: Side) -> Found:
    """Largest norms of their own, the last one's far off; norms are noted."""
    model = mlp(side)
    net = side.parallel(model)
    groups = [{"params": list(part.parameters())} for part in (model[:1], model[1:])]
    optimizer = torch.optim.SGD(groups, 0.1)
    norms = {}
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        for index, (group, largest) in enumerate(zip(optimizer.param_groups, (0.05, 0.2), strict=True)):
            norms[f"norm {index} of {step}"] = side.clip(model, largest, group["params"]).detach().double()
        norms[f"norm of {step}"] = side.clip(model, 1e9).detach().double()
        optimizer.step()
        optimizer.zero_grad()
    return {**state(model), **norms}
