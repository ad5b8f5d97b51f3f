"""Some parameters are not trained, or not in every step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.idioms.side import WIDTH, Found, Side, descend, fit, idiom, mlp, state, trained


@idiom()
def low_rank_adapters(side: Side) -> Found:
    """LoRA: a frozen base, adapters added before parallelize."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
            self.up = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Adapted(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3)))
    model.append(Adapted(nn.Linear(WIDTH, 2)))
    model.to(side.dtype)
    net = side.parallel(model)
    trains = [p for p in model.parameters() if p.requires_grad]
    fit(side, net, torch.optim.AdamW(trains, 0.01, eps=1e-3))
    return state(model)


@idiom()
def adapters_are_merged_for_evaluation(side: Side) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 2)).to(side.dtype)
    model[0].up = nn.Parameter(torch.full((WIDTH, 1), 0.1, dtype=side.dtype))
    model[0].down = nn.Parameter(torch.full((1, WIDTH), 0.1, dtype=side.dtype))
    model[0].weight.requires_grad_(False)
    layer, plain = model[0], nn.Linear.forward
    layer.forward = lambda x: plain(layer, x) + x @ layer.down.T @ layer.up.T
    net = side.parallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    notes = []
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with side.whole(model), torch.no_grad():
            merged = layer.weight + layer.up @ layer.down
            notes.append(merged.double().sum())
    return {**state(model), "merged": torch.stack(notes)}


class Adapted(nn.Module):
    """A frozen layer with an adapter that is merged into its weight, and taken out again."""

    def __init__(self, layer: nn.Linear, side: Side) -> None:
        super().__init__()
        self.layer, self.is_merged = layer.requires_grad_(False), False
        self.down = nn.Parameter(side.tensor(2, layer.in_features, seed=3) * 0.3)
        self.up = nn.Parameter(side.tensor(layer.out_features, 2, seed=4) * 0.1)

    def merge(self, sign: int) -> None:
        self.layer.weight.data += sign * (self.up.data @ self.down.data).to(self.layer.weight.dtype)
        self.is_merged = sign > 0

    def forward(self, x):
        return self.layer(x) if self.is_merged else self.layer(x) + x @ self.down.T @ self.up.T


@idiom()
def adapters_are_merged_while_the_model_is_evaluated(side: Side) -> Found:
    """Also by a copy of it: what is frozen is computed with beside masters."""
    model = mlp(side)
    model[0], model[3] = Adapted(model[0], side), Adapted(model[3], side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02, eps=1e-3)
    notes = []
    x, _ = side.batch(5)
    for _ in range(3):
        fit(side, net, optimizer, 1)
        with side.whole(model), torch.no_grad():
            model[0].merge(1)
            notes.append(side.mean(model(x).square().mean()))
            model[0].merge(-1)
        with torch.no_grad():
            notes.append(side.mean(copy.deepcopy(model)(x).square().mean()))
    return {**state(model), "evaluated": torch.stack(notes)}


@idiom()
def frozen_backbone_without_gradients(side: Side) -> Found:
    """The backbone runs under no_grad inside forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = mlp(side, outputs=WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


@idiom(unused=True)
def early_exit(side: Side) -> Found:
    """Later blocks are left out in some steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))

        def forward(self, x, depth):
            for block, head in list(zip(self.blocks, self.heads, strict=True))[:depth]:
                x = block(x).tanh()
                answer = head(x)
            return answer

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    depths = iter((3, 1, 2, 3))
    descend(side, optimizer, lambda x, y: (net(x, next(depths)) - y).square().mean(), 4)
    return state(model)


@idiom()
def layers_dropped_by_a_shared_draw(side: Side) -> Found:
    """Stochastic depth, drawn alike on all ranks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 2)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            for index, block in enumerate(self.blocks):
                if (self.calls + index) % 3:
                    x = x + block(x).tanh()
            return self.head(x)

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    side.unused = True
    net = side.parallel(model)
    fit(side, net, torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3), 4)
    return state(model)


@idiom(unused=True)
def layers_frozen_one_after_another(side: Side) -> Found:
    """requires_grad is switched off as training goes on."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        fit(side, net, optimizer, 1)
        model[step].requires_grad_(False)
    return state(model)


@idiom(unused=True)
def layers_frozen_and_trained_again(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model[0].requires_grad_(step % 2 == 0)
        fit(side, net, optimizer, 1)
    return state(model)


@idiom()
def gradients_of_some_layers_are_dropped(side: Side) -> Found:
    """Layers are frozen for a while by giving the optimizer no gradient."""
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    for step in range(4):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        if step < 2:
            for p in model[0].parameters():
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


class Selective(nn.Sequential):
    """Lists its last layer alone."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self[-1].named_parameters(str(len(self) - 1))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self[-1].parameters()


@idiom()
def parameters_that_a_model_does_not_list(side: Side) -> Found:
    """Its own `parameters()` is for one optimizer; another one trains the rest, but for what is frozen."""
    model = Selective(*mlp(side), nn.Linear(2, 2).to(side.dtype).requires_grad_(False), nn.Linear(2, 2).to(side.dtype))
    for layer in model[-2:]:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    net = side.parallel(model)
    head = torch.optim.SGD(model.parameters(), 0.1)
    rest = torch.optim.SGD([p for layer in model[:-2] for p in layer.parameters()], 0.1, momentum=0.9)
    for step in range(3):
        x, y = side.batch(step)
        (net(x) - y).square().mean().backward()
        for optimizer in (head, rest):
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def half_frozen(side: Side) -> nn.Sequential:
    model = mlp(side, blocks=3)
    model[1].requires_grad_(False)
    return model


def unfrozen_half_way(side: Side, model: nn.Sequential) -> Found:
    net, optimizer = side.parallel(model), torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    model[1].requires_grad_(False)
    fit(side, net, optimizer, 2)
    model[1].requires_grad_(True)
    fit(side, net, optimizer, 2)
    return state(model)


@idiom(
    unused=True,
    refused=tuple(
        (place, "frozen after pl.parallelize instead of before")
        for place in (*(f"zero {zero}" for zero in range(4)), "low")
    ),
)
def a_block_unfrozen_half_way(side: Side) -> Found:
    return unfrozen_half_way(side, half_frozen(side))


@idiom(unused=True)
def a_block_frozen_once_parallel_and_unfrozen_half_way(side: Side) -> Found:
    """What the refusal of the other way names: states are kept."""
    return unfrozen_half_way(side, mlp(side, blocks=3))


@idiom(unused=True)
def a_block_unfrozen_between_two_parallel_models(side: Side) -> Found:
    """What the refusal names, too."""
    model = half_frozen(side)
    net, optimizer = side.parallel(model), torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    side.release(model)
    model[1].requires_grad_(True)
    net, optimizer = side.parallel(model), torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    fit(side, net, optimizer, 2)
    return state(model)
