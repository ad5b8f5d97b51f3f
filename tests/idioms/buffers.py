"""Norms, buffers and random numbers: what modules keep beside parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.idioms.side import WIDTH, Found, Side, descend, evaluated, fit, idiom, mlp, state, trained


@idiom(off=0.1)
def weight_norm(side: Side) -> Found:
    torch.manual_seed(0)
    parts = [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return trained(side, nn.Sequential(*parts, nn.Tanh(), nn.Linear(WIDTH, 2)))


@idiom(off=0.1)
def old_weight_norm(side: Side) -> Found:
    torch.manual_seed(0)
    parts = [nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return trained(side, nn.Sequential(*parts, nn.Tanh(), nn.Linear(WIDTH, 2)))


@idiom(against="ddp", off=0.2)
def spectral_norm(side: Side) -> Found:
    torch.manual_seed(0)
    parts = [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return trained(side, nn.Sequential(*parts, nn.Tanh(), nn.Linear(WIDTH, 2)))


@idiom(off=0.2)
def spectral_norm_that_is_evaluated_whole(side: Side) -> Found:
    """By the model's parameters in full, and by a copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 2))
    net = side.parallel(model.to(side.dtype).eval())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    notes = []
    for step in range(3):
        fit(side, net, optimizer, 1)
        x, _ = side.batch(50 + step)
        with side.whole(model), torch.no_grad():
            notes.append(side.mean(model(x).square().mean()))
        with torch.no_grad():
            notes.append(side.mean(copy.deepcopy(model)(x).square().mean()))
    return {**state(model), "evaluated": torch.stack(notes)}


@idiom(off=0.1)
def orthogonal_weights(side: Side) -> Found:
    torch.manual_seed(0)
    maps = ("matrix_exp", "cayley", "householder")
    turned = [
        nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH).to(side.dtype), orthogonal_map=each)
        for each in maps
    ]
    return trained(side, nn.Sequential(*turned, nn.Tanh(), nn.Linear(WIDTH, 2)))


@idiom(against="ddp", off=0.2)
def batch_norm(side: Side) -> Found:
    torch.manual_seed(0)
    return trained(side, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))


@idiom(against="ddp", off=0.2)
def batch_norm_that_is_evaluated(side: Side) -> Found:
    """What each rank notes in evaluation is of rank 0's statistics, as by DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    notes = []
    for step in range(3):
        fit(side, net, optimizer, 1)
        model.eval()
        with torch.no_grad():
            x, y = side.batch(50 + step)
            notes.append((net(x) - y).square().mean())
        model.train()
    return {**state(model), "evaluated": torch.stack(notes).double()}


@idiom(against="ddp", off=0.2)
def batch_norm_frozen_half_way(side: Side) -> Found:
    """Statistics are used and no longer moved, as detectors are tuned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 2)
    model[1].eval()
    fit(side, net, optimizer, 2)
    return evaluated(side, net, model)


@idiom(against="ddp", off=0.2)
def a_codebook_in_buffers(side: Side) -> Found:
    """VQ-VAE: the nearest codes, which follow what was assigned to them, without gradients."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, 2)
            self.register_buffer("codes", torch.linspace(-1, 1, 20).view(5, 4))

        def forward(self, x):
            x = self.body(x)
            near = torch.cdist(x.float(), self.codes.float()).argmin(1)
            if self.training:
                with torch.no_grad():
                    chosen = F.one_hot(near, 5).to(self.codes.dtype)
                    seen = chosen.T @ x.detach().to(self.codes.dtype) / chosen.sum(0).clamp(min=1)[:, None]
                    self.codes.lerp_(torch.where(chosen.sum(0)[:, None] > 0, seen, self.codes), 0.5)
            code = self.codes[near].to(x.dtype)
            return self.head(x + (code - x).detach()), (x - code.detach()).square().mean()

    torch.manual_seed(0)
    model = Codes().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        answer, commitment = net(x)
        return (answer - y).square().mean() + commitment

    descend(side, optimizer, loss_of, 4)
    return evaluated(side, net, model)


class Centred(nn.Module):
    """DINO's centre, replaced and not written to."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.body = mlp(side)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x):
        x = self.body(x)
        answer = (x - self.centre.to(x.dtype)).tanh()
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0).to(self.centre.dtype)
        return answer


@idiom(against="ddp", off=0.2)
def a_centre_that_is_subtracted(side: Side) -> Found:
    return trained(side, Centred(side), steps=4)


def centred(side: Side, between: Callable[[Any, Tensor], Tensor], stepping: Collection[int] = range(4)) -> Found:
    """Four backward passes, some with a step; what `between` answers before each of these is noted."""
    model = Centred(side).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    notes = []
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        notes.append(between(net, x).detach().double().sum())
        if step in stepping:
            optimizer.step()
            optimizer.zero_grad()
    return {**evaluated(side, net, model), "notes": torch.stack(notes)}


def evaluating(net: Any, x: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        answer: Tensor = net(x)
    net.train()
    return answer


@idiom(against="ddp", off=0.2)
def a_centre_in_an_accumulation_without_no_sync(side: Side) -> Found:
    return centred(side, lambda net, x: x.new_zeros(1), stepping=(1, 3))


@idiom(against="ddp", off=0.2)
def a_centre_moved_by_a_forward_for_logging(side: Side) -> Found:
    return centred(side, lambda net, x: net(x))


@idiom(against="ddp", off=0.2)
def a_centre_evaluated_before_the_step(side: Side) -> Found:
    return centred(side, evaluating)


@idiom(against="ddp", off=0.2)
def a_centre_evaluated_where_a_step_is_skipped(side: Side) -> Found:
    return centred(side, evaluating, stepping=(0, 2, 3))


class Routed(nn.Module):
    """Experts of which the tokens choose one, and how many have chosen each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))
        self.register_buffer("chosen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(3))

    def forward(self, x):
        scores = self.router(x).sigmoid()
        choice = F.one_hot((scores + self.bias.to(x.dtype)).argmax(1), 3)
        if self.training:
            self.chosen += choice.sum(0)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return (answers * (choice * scores)[:, :, None]).sum(1)


@idiom(against="ddp", off=0.5)
def experts_balanced_after_the_step(side: Side) -> Found:
    """Without an auxiliary loss: what all ranks have counted is summed after the step, moves the bias, is set back."""
    torch.manual_seed(0)
    model = Routed().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    notes = []
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = side.mean(model.chosen) * side.ranks
        notes.append(total)
        model.bias += 0.1 * torch.sign(total.mean() - total).to(model.bias.dtype)
        model.chosen.zero_()
    return {**evaluated(side, net, model), "chosen": torch.stack(notes)}


@idiom(against="ddp", off=0.5)
def statistics_averaged_after_the_step(side: Side) -> Found:
    """By the loop, in place, as some do before they evaluate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 2)
    for buffer in (model[1].running_mean, model[1].running_var):
        buffer.copy_(side.mean(buffer))
    return evaluated(side, net, model)


@idiom(against="ddp", low=False)
def dropout(side: Side) -> Found:
    """The random numbers of a rank are used up as by DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)), nn.Linear(16, 2)
    ).to(side.dtype)
    net = side.parallel(model)
    torch.manual_seed(100 + side.rank)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), 3)
    return {**state(model), "next": torch.rand(3, dtype=torch.float64)}


@idiom(against="one", off=0.1)
def a_buffer_made_by_expand(side: Side) -> Found:
    """One row in memory, which each forward moves."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2)
            self.register_buffer("scales", torch.ones(1, 2).expand(4, 2))

        def forward(self, x):
            self.scales = (self.scales[:1] * 0.5).expand(4, 2)
            return self.linear(x) * self.scales.mean(0)

    torch.manual_seed(side.rank)
    return trained(side, Scaled())
