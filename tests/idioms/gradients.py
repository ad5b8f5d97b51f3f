"""What loops do to gradients between backward and step, and add to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.idioms.side import Found, Side, descend, fit, idiom, mlp, state


@idiom(refused=tuple((f"zero {zero}", "backward with create_graph=True") for zero in range(4)))
def a_penalty_on_what_backward_left(side: Side) -> Found:
    """Under DDP each rank's own part of it has a graph."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        optimizer.zero_grad()
        ((net(x) - y).square().mean() + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def gradients_edited_by_hand(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        for index, p in enumerate(model.parameters()):
            if p.grad is None:
                continue
            if index % 3 == 0:
                p.grad.mul_(0.5)
            elif index % 3 == 1:
                p.grad = p.grad * 2
            else:
                p.grad.data.clamp_(-0.1, 0.1)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    return state(model)


@idiom()
def gradients_made_before_backward(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.zeros(p.shape, dtype=p.dtype)
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        optimizer.step()
    return state(model)


@idiom(against="ddp", low=False)
def hooks_on_parameters(side: Side) -> Found:
    """A hook that scales a gradient, and one that looks at it after it has been added."""
    model = mlp(side)
    seen = []
    net = side.parallel(model)
    for index, p in enumerate(model.parameters()):
        p.register_hook(lambda gradient, index=index: gradient * (1 + index % 2))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return {**state(model), "seen": torch.tensor(float(len(seen)))}


@idiom(against="ddp")
def a_hook_on_several_parameters(side: Side) -> Found:
    """Registered once, before and after the model is made parallel; told of every backward."""
    model = mlp(side)
    calls = torch.zeros(2)

    def told(gradients: Sequence[Tensor | None]) -> None:
        assert all(
            gradient is not None and gradient.shape == p.shape for gradient, p in zip(gradients, watched, strict=True)
        )
        calls.add_(torch.tensor([1.0, 0.0]))

    watched = list(model[1:3].parameters())
    torch.autograd.graph.register_multi_grad_hook(watched, told)
    net = side.parallel(model)
    with side.whole(model):
        torch.autograd.graph.register_multi_grad_hook([model[0].bias, model[3].weight], lambda _: calls[1].add_(1))
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    return {**state(model), "calls": calls.double()}


@idiom()
def hooks_on_tensors_and_modules(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    norms = []
    model[1].register_full_backward_hook(
        lambda module, into, out: norms.append(out[0].detach().double().square().sum())
    )
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    model[2].register_forward_hook(lambda module, args, output: output + args[0])
    model[1].register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        answer = net(x)
        answer.register_hook(lambda gradient: gradient.mul(0.5))
        return (answer - y).square().mean()

    fit(side, net, optimizer, loss_of=loss_of)
    assert len(norms) == 3 * side.micro
    return state(model)


@idiom(against="ddp", low=False)
def gradients_by_autograd_grad(side: Side) -> Found:
    """`p.grad = grad(...)`: DDP does not see this either; here it is what the user averages."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        loss = (net(x) - y).square().mean()
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.grad = side.mean(gradient).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def penalties_on_weights(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (net(x) - y).square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())

    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), loss_of=loss_of)
    return state(model)


@idiom(off=0.15)
def old_weights_hold_new_ones_back(side: Side) -> Found:
    """Elastic weight consolidation: a penalty on the distance from former weights."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 2)
    former = {name: value.to(side.dtype) for name, value in state(model).items()}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = (net(x) - y).square().mean()
        return loss + sum((p - former[name].to(p.dtype)).square().sum() for name, p in model.named_parameters())

    descend(side, optimizer, loss_of, 2)
    return state(model)


@idiom()
def gradients_detached_in_place_and_zeroed(side: Side) -> Found:
    """What `zero_grad` was written out as before optimizers had it."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        optimizer.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
    return state(model)


@idiom(refused=(("zero 3", "runs inside torch.autograd.forward_ad"),), low=False)
def a_directional_derivative_in_the_loss(side: Side) -> Found:
    """By forward mode."""
    model = mlp(side)
    net = side.parallel(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            output, slope = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
            return (output - y).square().mean() + slope.square().mean()

    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), loss_of=loss_of)
    return state(model)


@idiom(refused=(("zero 3", "inside a transform of torch.func"),), low=False)
def slopes_by_vjp_in_the_loss(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output, backward = torch.func.vjp(net, x)
        (slope,) = backward(torch.ones_like(output))
        return (output - y).square().mean() + slope.square().mean()

    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), loss_of=loss_of)
    return state(model)


@idiom(low=False)
def numbers_of_a_scale_are_printed(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = mlp(side), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.body(x) * self.scale

    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    told = []
    for step in range(2):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        grad = model.scale.grad
        # Of a parameter server rank 0 alone has gradients.
        told.append(grad is None or f"{grad:.6f}" == f"{grad.item():.6f}")
        optimizer.step()
        momentum = optimizer.state[model.scale]
        told.append(grad is None or float(f"{momentum['momentum_buffer']:.6f}") != 0)
        optimizer.zero_grad()
    return {**state(model), "told": torch.tensor(told)}
