"""What models are made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.idioms.side import WIDTH, Found, Side, Stack, fit, idiom, mlp, state, trained


@idiom()
def checkpoints_with_keyword_arguments(side: Side) -> Found:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, *, scale, mask=None):
            x = self.linear(x).tanh() * scale
            return x if mask is None else x * mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, scale=0.5, mask=(x > 0), use_reentrant=False)
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def checkpoints_of_a_sequence(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = mlp(side, blocks=4)

        def forward(self, x):
            return checkpoint_sequential(self.blocks, 3, x, use_reentrant=False)

    return trained(side, Model())


@idiom()
def a_recurrent_cell_called_in_a_loop(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x):
            hidden = x.new_zeros(len(x), WIDTH)
            for part in x.chunk(WIDTH // 2, dim=1):
                hidden = self.cell(part, hidden)
            return self.head(hidden)

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def an_lstm_through_time_with_kept_state(side: Side) -> Found:
    """Truncated backpropagation: the state goes on, detached."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), "head": nn.Linear(WIDTH, 2)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x, kept):
            x, kept = self.parts["lstm"](x[:, None], kept)
            return self.parts["head"](x[:, 0]), kept

    whole = Model().to(side.dtype)
    net = side.parallel(whole)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    kept = None
    for step in range(3):
        x, y = side.batch(step)
        answer, kept = net(x, kept)
        kept = tuple(part.detach() for part in kept)
        (answer - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(whole)


@idiom(off=0.15)
def torchs_transformer(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 2)

        def forward(self, x):
            x = self.encoder(x[:, None] * torch.linspace(-1, 1, 3, dtype=x.dtype)[None, :, None])
            return self.head(x.mean(1))

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def convolutions(side: Side) -> Found:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()) for _ in range(2)]
    return trained(
        side,
        nn.Sequential(
            nn.Unflatten(1, (1, WIDTH)),
            nn.Conv1d(1, 4, 3),
            *blocks,
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
    )


@idiom(off=0.15)
def experts_by_the_largest_score(side: Side) -> Found:
    """A mixture of experts with top-1 routing, and its balance loss kept on the module."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            scores = self.route(x).softmax(1)
            every = torch.stack([expert(x) for expert in self.experts], 1)
            best, which = scores.max(1)
            self.balance = (scores * scores).sum(1).mean()
            return x + best[:, None] * every[torch.arange(len(x)), which]

    torch.manual_seed(0)
    model = Stack(Experts, 2).to(side.dtype)
    net = side.parallel(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return (net(x) - y).square().mean() + 0.1 * sum(block.balance for block in model.blocks)

    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), loss_of=loss_of)
    return state(model)


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor | None = None


Pair = namedtuple("Pair", "loss logits")


@idiom()
def answers_that_are_dataclasses(side: Side) -> Found:
    """As Hugging Face's models: the loss is computed inside."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(side)

        def forward(self, x, labels=None, tuple_instead=False):
            logits = self.body(x)
            loss = (logits - labels).square().mean()
            return Pair(loss, logits) if tuple_instead else Answer(loss=loss, logits=logits)

    model = Model()
    net = side.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        x, y = side.batch(step)
        net(x, labels=y, tuple_instead=step % 2 == 1).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


class Trace(list):
    pass


class Told:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Trace, Told]:
        hidden = torch.tanh(self.aside(x))
        return x + torch.tanh(self.map(x)), Trace([hidden, self.gain[:]]), Told(hidden.square())


@idiom()
def blocks_that_return_collections_of_their_own(side: Side) -> Found:
    """Beside a tensor, what they found on the way and a view of a parameter, in a list and an object of own classes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Telling() for _ in range(3))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = x.new_zeros(())
            for block in self.blocks:
                x, trace, told = block(x)
                found = found + (trace[0] * trace[1]).mean() + told.hidden.mean()
            return self.head(x), found

    torch.manual_seed(0)
    model = Model().to(side.dtype)
    net = side.parallel(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        answer, found = net(x)
        return (answer - y).square().mean() + 0.1 * found

    fit(side, net, torch.optim.SGD(model.parameters(), 0.1), loss_of=loss_of)
    return state(model)
