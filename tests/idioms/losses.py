"""Losses of several parts."""

from __future__ import annotations

import copy
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.idioms.side import WIDTH, Found, Side, descend, fit, idiom, mlp, state


@idiom(refused=(("zero 3", "hold"),), off=0.15)
def gradient_penalty(side: Side) -> Found:
    """A WGAN's critic: the norm of its gradient by its input is part of the loss."""
    model = mlp(side, outputs=1)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-2)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        x.requires_grad_(True)
        score = net(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 0.5 * (slope.square().sum(1).add(1e-3).sqrt() - 1).square().mean()

    descend(side, optimizer, loss_of)
    return state(model)


@idiom()
def adversarial_inputs(side: Side) -> Found:
    """The gradient by the input first (FGSM), then a step at the moved input."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad((net(x) - y).square().mean(), x)
        moved = (x + 0.1 * torch.tanh(1e2 * slope / side.ranks)).detach()
        return (net(moved) - y).square().mean()

    descend(side, optimizer, loss_of)
    return state(model)


@idiom()
def adversarial_inputs_by_backward(side: Side) -> Found:
    """As above by loss.backward() and zero_grad, as tutorials do."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_(True)
        (net(x) - y).square().mean().backward()
        moved = (x + 0.5 * x.grad / side.ranks).detach()
        optimizer.zero_grad()
        return (net(moved) - y).square().mean()

    descend(side, optimizer, loss_of)
    return state(model)


@idiom(against="ddp")
def contrastive_with_gathered_features(side: Side) -> Found:
    """CLIP: features of all ranks, a rank's own with their graph, and a learned scale."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(side, outputs=4), mlp(side, seed=1, outputs=4)
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=side.dtype))

        def forward(self, x):
            return F.normalize(self.image(x), dim=1), F.normalize(self.text(x.flip(1)), dim=1), self.scale.exp()

    model = Towers()
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        image, text, scale = net(x)
        scores = scale * side.gather(image) @ side.gather(text).T
        goal = torch.arange(len(scores))
        return (F.cross_entropy(scores, goal) + F.cross_entropy(scores.T, goal)) / 2

    descend(side, optimizer, loss_of)
    return state(model)


class Heads(nn.Module):
    """A trunk and two heads."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.trunk = mlp(side, outputs=WIDTH)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 2)}).to(side.dtype)

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


@idiom(unused=True)
def tasks_in_turn(side: Side) -> Found:
    """Another head in every other step."""
    model = Heads(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    tasks = cycle("ab")
    descend(side, optimizer, lambda x, y: (net(x, next(tasks)) - y).square().mean(), 4)
    return state(model)


@idiom(unused=True)
def tasks_in_turn_with_zeros(side: Side) -> Found:
    """The same where gradients are zeroed and not dropped, so that momentum goes on."""
    model = Heads(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(4):
        x, y = side.batch(step)
        (net(x, "ab"[step % 2]) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return state(model)


@idiom()
def tasks_weighed_by_learned_uncertainty(side: Side) -> Found:
    model = Heads(side)
    model.register_parameter("weights", nn.Parameter(torch.zeros(2, dtype=side.dtype)))
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([(net(x, task) - y).square().mean() for task in "ab"])
        return ((-model.weights).exp() * losses + model.weights).sum()

    descend(side, optimizer, loss_of)
    return state(model)


@idiom()
def triplets(side: Side) -> Found:
    model = mlp(side, outputs=4)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        return F.triplet_margin_with_distance_loss(
            net(x), net(x.flip(1)), net(-x), distance_function=lambda a, b: (a - b).square().sum(1), margin=50.0
        )

    descend(side, optimizer, loss_of)
    return state(model)


@idiom()
def siamese_with_a_stopped_gradient(side: Side) -> Found:
    model = nn.ModuleDict({"body": mlp(side, outputs=4), "predicts": nn.Linear(4, 4).to(side.dtype)})

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, a, b):
            first, second = self.parts["body"](a), self.parts["body"](b)
            p, q = self.parts["predicts"](first), self.parts["predicts"](second)
            return p, q, first.detach(), second.detach()

    whole = Siamese()
    net = side.parallel(whole)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)

    def loss_of(x: Tensor, _: Tensor) -> Tensor:
        p, q, first, second = net(x, x.flip(1))
        return (p - second).square().mean() + (q - first).square().mean()

    descend(side, optimizer, loss_of)
    return state(whole)


@idiom(against="ddp", off=0.1)
def actor_and_critic_over_several_epochs(side: Side) -> Found:
    """PPO: old probabilities without gradients, then several epochs of minibatches with clipping."""
    model = Heads(side)
    net = side.parallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    x, y = side.batch(0)
    with torch.no_grad():
        old = net(x, "a").log_softmax(1)[:, 0]
        gain = y[:, 0] - net(x, "b")[:, 0]
    for _ in range(2):
        for part in torch.arange(len(x)).chunk(2):
            ratio = (net(x[part], "a").log_softmax(1)[:, 0] - old[part]).exp()
            value = net(x[part], "b")[:, 0]
            policy = -torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part]).mean()
            (policy + 0.5 * (value - y[part, 0]).square().mean()).backward()
            side.clip(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@idiom()
def losses_of_every_block(side: Side) -> Found:
    """Deep supervision by what hooks caught."""
    model = mlp(side, blocks=3)
    net = side.parallel(model)
    caught = []
    for block in model[1:-1]:
        block.register_forward_hook(lambda module, args, output: caught.append(output))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = (net(x) - y).square().mean() + sum(hidden.square().mean() for hidden in caught)
        caught.clear()
        return loss

    descend(side, optimizer, loss_of)
    return state(model)


@idiom()
def weights_of_losses_by_their_gradients(side: Side) -> Found:
    """A loss's weight from the gradient of what the trunk gave, by autograd.grad inside a step."""
    model = Heads(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        first = (net(x, "a") - y).square().mean()
        second = (net(x, "b") + y).abs().mean()
        weight = side.mean(first.detach()) / (side.mean(second.detach()) + 1)
        return first + weight.to(first.dtype) * second

    descend(side, optimizer, loss_of)
    return state(model)


def slopes(model: nn.Module, x: Tensor, y: Tensor) -> Found:
    """This rank's gradients, by torch.func."""

    def loss(parameters: Found) -> Tensor:
        return (torch.func.functional_call(model, parameters, (x,)) - y).square().mean()

    found = torch.func.grad(loss)(dict(model.named_parameters()))
    return {f"slope of {name}": value.detach().double() for name, value in found.items()}


@idiom(
    against="ddp",
    refused=tuple(
        (place, r"transform a plain copy, made by copy.deepcopy\(model\)")
        for place in ("zero 1", "zero 2", "zero 3", "low", "parameter server")
    ),
)
def slopes_by_func_where_parameters_are_whole(side: Side) -> Found:
    model = mlp(side)
    net, optimizer = side.parallel(model), torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    with side.whole(model):
        found = slopes(model, *side.batch(0))
    fit(side, net, optimizer, 1)
    return {**state(model), **found}


@idiom(against="ddp")
def slopes_by_func_of_a_copy(side: Side) -> Found:
    model = mlp(side)
    net, optimizer = side.parallel(model), torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    found = slopes(copy.deepcopy(model), *side.batch(0))
    fit(side, net, optimizer, 1)
    return {**state(model), **found}
