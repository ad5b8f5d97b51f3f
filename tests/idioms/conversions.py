"""Models whose weights are made of another dtype once they are parallel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.idioms.side import Found, Side, fit, idiom, mlp, state

SHARDED = ("zero 3", "convert it after pl.release")
SAID = "since pl.parallelize"
REFUSED = tuple((place, SAID) for place in ("shared parameters", "zero 0", "zero 1", "zero 2"))
"""DDP reduces nothing of a parameter from when it was converted on."""


@idiom(refused=(*REFUSED, SHARDED), low=False)
def a_model_is_widened_before_it_trains(side: Side) -> Found:
    model = mlp(side).float()
    net = side.parallel(model)
    model.double()
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    return state(model)


@idiom(refused=(*REFUSED, SHARDED), low=False)
def a_model_is_widened_half_way(side: Side) -> Found:
    model = mlp(side).float()
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (net(side.batch(0)[0].float())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.double()
    fit(side, net, optimizer)
    return state(model)


@idiom(refused=(("shared parameters", "was edited"), SHARDED), low=False)
def a_model_narrowed_and_widened(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    model.half()
    model.double()
    fit(side, net, optimizer, 1)
    return state(model)


@idiom(refused=(*REFUSED, SHARDED), low=False)
def a_part_is_widened(side: Side) -> Found:
    model = mlp(side)
    model[1].float()
    net = side.parallel(model)
    model[1].double()
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    return state(model)


@idiom(refused=(("shared parameters", SAID), SHARDED), low=False)
def a_model_is_saved_narrow(side: Side) -> Found:
    """The last thing that a script does."""
    model = mlp(side)
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), 0.1))
    model.half()
    with torch.no_grad():
        assert net(side.batch(9)[0].half()).dtype == torch.float16
    found = model.state_dict()
    assert all(value.dtype == torch.float16 for value in found.values())
    return {name: value.double() for name, value in found.items()}


@idiom(refused=(SHARDED,))
def a_model_is_widened_to_what_it_is(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model.to(side.dtype)
        for x, y in side.micro_batches(net, step):
            (net(x) - y).square().mean().div(side.micro).backward()
        model.to(side.dtype)
        optimizer.step()
        model.to(side.dtype)
        optimizer.zero_grad()
        with torch.no_grad():
            net(x)
    return state(model)


@idiom(refused=tuple((place, SAID) for place in ("low", "zero 1", "zero 2", "zero 3", "parameter server")))
def a_model_is_narrowed_while_it_is_whole(side: Side) -> Found:
    model = mlp(side)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(side, net, optimizer, 1)
    with side.whole(model):
        model.half()
    with torch.no_grad():
        side.mean(net(side.batch(9)[0].half()).mean())
    model.to(side.dtype)
    return state(model)


class _Router(nn.Module):
    """Casts itself to float32 in its forward, as those of transformers' SwitchTransformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return self.classifier(x.float()).softmax(-1).to(x.dtype) * x


@idiom(refused=(*REFUSED, ("zero 3", SAID)), low=False)
def a_router_casts_itself(side: Side) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), _Router(), nn.Linear(6, 3)).to(side.dtype)
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        net(side.batch(step)[0][:, :6]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)
