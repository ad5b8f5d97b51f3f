"""Several models that learn together."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state


@idiom()
def adversarial_pair(side: Side) -> Found:
    """A GAN: two models, two optimizers, the discriminator first."""
    generator, judge = mlp(side, outputs=WIDTH), mlp(side, seed=1, outputs=1)
    makes, judges = side.parallel(generator), side.parallel(judge)
    first = torch.optim.Adam(judge.parameters(), 0.01, betas=(0.5, 0.9), eps=1e-3)
    second = torch.optim.Adam(generator.parameters(), 0.01, betas=(0.5, 0.9), eps=1e-3)
    for step in range(3):
        real, _ = side.batch(step)
        noise = side.rows(side.tensor(8, WIDTH, seed=500 + step))
        first.zero_grad()
        loss = F.softplus(-judges(real)).mean() + F.softplus(judges(makes(noise).detach())).mean()
        loss.backward()
        first.step()
        second.zero_grad()
        F.softplus(-judges(makes(noise))).mean().backward()
        second.step()
    return {**state(generator), **state(judge, "judge ")}


@idiom()
def adversarial_pair_with_frozen_judge(side: Side) -> Found:
    """requires_grad is switched off while the generator learns."""
    generator, judge = mlp(side, outputs=WIDTH), mlp(side, seed=1, outputs=1)
    makes, judges = side.parallel(generator), side.parallel(judge)
    first = torch.optim.SGD(judge.parameters(), 0.05)
    second = torch.optim.SGD(generator.parameters(), 0.05)
    for step in range(3):
        real, _ = side.batch(step)
        noise = side.rows(side.tensor(8, WIDTH, seed=500 + step))
        judge.requires_grad_(True)
        first.zero_grad()
        (F.softplus(-judges(real)).mean() + F.softplus(judges(makes(noise).detach())).mean()).backward()
        first.step()
        judge.requires_grad_(False)
        second.zero_grad()
        F.softplus(-judges(makes(noise))).mean().backward()
        second.step()
    return {**state(generator), **state(judge, "judge ")}


@idiom()
def distillation_from_a_parallel_teacher(side: Side) -> Found:
    teacher = mlp(side, seed=3)
    teaches = side.parallel(teacher) if side.ranks == 1 or type(side).__name__ == "Paceline" else teacher
    teacher.requires_grad_(False)
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, _ in side.micro_batches(net, step):
            with torch.no_grad():
                wanted = teaches(x)
            (net(x) - wanted).square().mean().div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@idiom()
def encoder_and_decoder_apart(side: Side) -> Found:
    """A VAE of two parallel models, one graph, one optimizer."""
    encoder, decoder = mlp(side, outputs=6), mlp(side, seed=1, inputs=3, outputs=WIDTH)
    encodes, decodes = side.parallel(encoder), side.parallel(decoder)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 0.01, eps=1e-3)
    for step in range(3):
        x, _ = side.batch(step)
        mean, spread = encodes(x).chunk(2, dim=1)
        noise = side.rows(side.tensor(8, 3, seed=700 + step))
        again = decodes(mean + noise * (spread / 2).exp())
        ((again - x).square().mean() + 0.1 * (mean.square() + spread.exp() - spread - 1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**state(encoder), **state(decoder, "decoder ")}


@idiom()
def a_loss_that_is_a_module_with_parameters(side: Side) -> Found:
    """Centre loss: the loss is a parallel model of its own, with an optimizer of its own."""
    model = mlp(side, outputs=4)
    centres = nn.Linear(4, 3).to(side.dtype)
    net, judges = side.parallel(model), side.parallel(centres)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(centres.parameters(), 0.5)]
    for step in range(3):
        x, _ = side.batch(step)
        F.cross_entropy(judges(net(x)), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {**state(model), **state(centres, "centres ")}


@idiom()
def total_variation_of_two_fits(side: Side) -> Found:
    """Two models that learn from each other, with detached answers."""
    a, b = mlp(side), mlp(side, seed=5)
    first, second = side.parallel(a), side.parallel(b)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (a, b)]
    for step in range(3):
        x, y = side.batch(step)
        one, two = first(x), second(x)
        ((one - y).square().mean() + (one - two.detach()).square().mean()).backward()
        ((two - y).square().mean() + (two - one.detach()).square().mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    fit(side, first, optimizers[0], 1)
    return {**state(a), **state(b, "b ")}


@idiom(refused=(("zero 3", "belongs to another parallel model already"),))
def two_models_share_a_weight(side: Side) -> Found:
    """Each is parallel by itself."""
    first, second = mlp(side), mlp(side, seed=1)
    second[0].weight = first[0].weight
    one, other = side.parallel(first), side.parallel(second)
    optimizer = torch.optim.SGD({id(p): p for p in (*first.parameters(), *second.parameters())}.values(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        ((one(x) - y).square().mean() + (other(x) + y).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**state(first), **state(second, "second ")}


@idiom()
def gradients_of_one_step_another(side: Side) -> Found:
    """As of workers that compute for a shared model."""
    model, steps = mlp(side), mlp(side, seed=1)
    net, _ = side.parallel(model), side.parallel(steps)
    optimizer = torch.optim.SGD(steps.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        for p, q in zip(model.parameters(), steps.parameters(), strict=True):
            q.grad = 0.5 * p.grad if step == 1 else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return state(steps)
