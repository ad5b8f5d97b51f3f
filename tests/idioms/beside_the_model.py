"""Weights beside the model's own: teachers and target networks that follow it, averages evaluated in its place."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.idioms.side import Found, Side, fit, idiom, mlp, state


@idiom()
def a_teacher_that_follows(side: Side) -> Found:
    """Self-distillation: the teacher is a plain copy, moved in full."""
    model = mlp(side)
    teacher = copy.deepcopy(model).requires_grad_(False)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, _ in side.micro_batches(net, step):
            with torch.no_grad():
                taught = teacher(x.flip(1))
            (net(x) - taught).square().mean().div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        with side.whole(model), torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), model.parameters(), strict=True):
                theirs.lerp_(ours.to(theirs.dtype), 0.2)
    return {**state(model), **state(teacher, "teacher ")}


@idiom(refused=(("zero 3", "was edited, but this rank updates only its shard"), ("low", "was edited")))
def a_teacher_inside_the_model_moves_in_its_forward(side: Side) -> Found:
    """Momentum contrast: keys are of a teacher that follows by way of p.data."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learns = mlp(side)
            self.teaches = copy.deepcopy(self.learns).requires_grad_(False)

        def forward(self, x):
            for theirs, ours in zip(self.teaches.parameters(), self.learns.parameters(), strict=True):
                theirs.data.mul_(0.8).add_(ours.data, alpha=0.2)
            return self.learns(x), self.teaches(x.flip(1))

    model = Model()
    net = side.parallel(model)

    def loss_of(x, y):
        queries, keys = net(x)
        return (queries - keys - y).square().mean()

    fit(side, net, torch.optim.SGD(model.learns.parameters(), 0.1), loss_of=loss_of)
    return state(model)


@idiom()
def a_target_network_is_loaded_now_and_then(side: Side) -> Found:
    model, target = mlp(side), mlp(side).requires_grad_(False)
    net = side.parallel(model)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01, eps=1e-3)
    for step in range(4):
        if step % 2 == 0:
            target.load_state_dict(model.state_dict())
        x, y = side.batch(step)
        with torch.no_grad():
            wanted = y[:, :1] + 0.9 * target(x.flip(1)).max(1, keepdim=True).values
        values = net(x).gather(1, (x[:, :1] > 0).long())
        nn.functional.smooth_l1_loss(values, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def averaged_weights_are_evaluated_in_the_models_place(side: Side) -> Found:
    model = mlp(side)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    answers = []
    for _ in range(2):
        fit(side, net, optimizer, 1)
        for name, value in model.state_dict().items():
            average[name].lerp_(value.to(side.dtype), 0.3)
        kept = dict(average)
        for given in (average, {"1.0.bias": average["1.0.bias"], "3.weight": average["3.weight"]}):
            with torch.no_grad():
                answers.append(side.mean(torch.func.functional_call(model, given, (side.batch(9)[0],)).square().mean()))
        assert all(average[name] is value for name, value in kept.items())
    return {**state(model), "answers": torch.stack(answers)}
