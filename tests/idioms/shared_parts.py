"""Parallel models that have a part in common, which belongs to the first of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.idioms.side import WIDTH, Found, Side, idiom, mlp, state

_REFUSED = (("zero 3", "belongs to another parallel model already"),)


class Headed(nn.Module):
    """A head on a trunk that others have, too."""

    def __init__(self, trunk: nn.Module, outputs: int, seed: int, side: Side) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk, self.head = trunk, nn.Linear(2, outputs).to(side.dtype)
        self.scale = nn.Parameter(torch.ones(outputs, dtype=side.dtype))

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.trunk(x))) * self.scale


def _pair(side: Side) -> tuple[Headed, Headed, Any, Any]:
    trunk = mlp(side)
    actor, critic = Headed(trunk, 2, 1, side), Headed(trunk, 1, 2, side)
    return actor, critic, side.parallel(actor), side.parallel(critic)


def _ended(actor: nn.Module, critic: nn.Module) -> Found:
    return {**state(actor), **state(critic, "critic ")}


@idiom(refused=_REFUSED)
def actor_and_critic_have_a_trunk(side: Side) -> Found:
    """One loss of both, one optimizer of all, clipped by torch."""
    actor, critic, acts, judges = _pair(side)
    parameters = list({id(p): p for p in (*actor.parameters(), *critic.parameters())}.values())
    optimizer, norms = torch.optim.AdamW(parameters, 0.01, eps=1e-3), []
    for step in range(4):
        x, y = side.batch(step)
        value = judges(x)
        advantage = (y.sum(1, keepdim=True) - value).detach()
        loss = ((acts(x) - y).square() * advantage.square()).mean() + (value - y.sum(1, keepdim=True)).square().mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5).double())
        optimizer.step()
        optimizer.zero_grad()
    return {**_ended(actor, critic), "norms": torch.stack(norms)}


@idiom(refused=_REFUSED, unused=True)
def they_learn_in_turn(side: Side) -> Found:
    """Each with its optimizer and its loss; the trunk is in the actor's, and learns from both."""
    actor, critic, acts, judges = _pair(side)
    own = [p for name, p in critic.named_parameters() if not name.startswith("trunk")]
    first, second = torch.optim.Adam(actor.parameters(), 0.01, eps=1e-3), torch.optim.SGD(own, 0.1, momentum=0.9)
    for step in range(4):
        x, y = side.batch(2 * step)
        (judges(x) - y.sum(1, keepdim=True)).square().mean().backward()
        second.step()
        second.zero_grad()
        x, y = side.batch(2 * step + 1)
        (acts(x) - y).square().mean().backward()
        first.step()
        first.zero_grad()
    return _ended(actor, critic)


@idiom(refused=_REFUSED, unused=True)
def the_second_alone_learns(side: Side) -> Found:
    """With the trunk, whose own model is never called; clipped as one model."""
    actor, critic, _, judges = _pair(side)
    optimizer, norms = torch.optim.Adam(critic.parameters(), 0.01, eps=1e-3), []
    for step in range(4):
        for x, y in side.micro_batches(judges, step):
            (judges(x) - y.sum(1, keepdim=True)).square().mean().div(side.micro).backward()
        norms.append(side.clip(critic, 0.3).double())
        optimizer.step()
        optimizer.zero_grad()
    return {**_ended(actor, critic), "norms": torch.stack(norms)}


@idiom(refused=_REFUSED)
def the_second_is_read_copied_and_loaded(side: Side) -> Found:
    """Its states have the trunk, too, as it is updated."""
    actor, critic, acts, judges = _pair(side)
    parameters = list({id(p): p for p in (*actor.parameters(), *critic.parameters())}.values())
    optimizer, seen = torch.optim.Adam(parameters, 0.01, eps=1e-3), {}
    begun = {name: value.clone() for name, value in critic.state_dict().items()}
    for step in range(4):
        x, y = side.batch(step)
        ((acts(x) - y).square().mean() + (judges(x) - 1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            seen = {**state(critic, "then "), **state(copy.deepcopy(critic), "copy ")}
            with side.whole(critic), torch.no_grad():
                seen |= {f"whole {name}": p.detach().double().clone() for name, p in critic.named_parameters()}
                for p in critic.parameters():
                    p.mul_(0.9)
        if step == 2:
            critic.load_state_dict({**critic.state_dict(), **{n: v for n, v in begun.items() if "head" in n}})
    return {**_ended(actor, critic), **seen}


@idiom(refused=_REFUSED)
def a_decoder_has_the_weight_of_an_encoders_embedding(side: Side) -> Found:
    """A parameter alone, in a module of the second's own."""
    torch.manual_seed(3)
    encoder = nn.Sequential(nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)).to(side.dtype)
    decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12)).to(side.dtype)
    decoder[2].weight = encoder[0].weight
    encodes, decodes = side.parallel(encoder), side.parallel(decoder)
    parameters = list({id(p): p for p in (*decoder.parameters(), *encoder.parameters())}.values())
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    tokens = torch.randint(12, (4, 8), generator=torch.Generator().manual_seed(5))
    for step in range(4):
        row = side.rows(tokens[step])
        F.cross_entropy(decodes(encodes(row)), (row + 1) % 12).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**state(encoder), **state(decoder, "decoder ")}


@idiom(refused=_REFUSED)
def a_parallel_model_is_put_into_a_larger_one(side: Side) -> Found:
    """It is trained by itself first, then as a part."""
    inner = mlp(side)
    runs, outer = side.parallel(inner), None
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    for step in range(2):
        x, y = side.batch(step)
        (runs(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(4)
    outer = nn.Sequential(inner, nn.Linear(2, 2).to(side.dtype))
    together = side.parallel(outer)
    optimizer = torch.optim.Adam(outer.parameters(), 0.01, eps=1e-3)
    for step in range(2, 5):
        x, y = side.batch(step)
        (together(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(outer)


@idiom(refused=_REFUSED, unused=True)
def a_part_of_a_parallel_model_is_parallel_itself(side: Side) -> Found:
    """It has no parameter that is not the whole's, is trained by itself in between, and evaluated."""
    trunk = mlp(side)
    whole = nn.Sequential(trunk, nn.Tanh(), nn.Linear(2, 2).to(side.dtype))
    together, alone = side.parallel(whole), side.parallel(nn.Sequential(trunk))
    optimizers = [torch.optim.AdamW(whole.parameters(), 0.01, eps=1e-3), torch.optim.SGD(trunk.parameters(), 0.1)]
    seen = []
    for step in range(4):
        for net, optimizer in zip((together, alone), optimizers, strict=True):
            x, y = side.batch(step)
            (net(x) - y).square().mean().backward()
            with torch.no_grad():
                seen.append(side.mean(alone(x).square().mean()))
            optimizer.step()
            optimizer.zero_grad()
    return {**state(whole), "seen": torch.stack(seen)}
