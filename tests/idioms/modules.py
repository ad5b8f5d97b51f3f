"""What models are made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state, trained


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

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Experts() for _ in range(2)), nn.Linear(WIDTH, 2)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Model().to(side.dtype)
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


@idiom()
def a_shared_block_at_two_depths(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.first, self.second = shared, shared
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.head(self.second(x + self.first(x)))

    torch.manual_seed(0)
    return trained(side, Model())


@idiom()
def weights_made_by_a_network(side: Side) -> Found:
    """A hypernetwork: the weights of a layer are computed, and used by functional_call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.makes = nn.Linear(3, 2 * WIDTH)
            self.layer = nn.Linear(WIDTH, 2)
            self.seed = nn.Parameter(torch.ones(3))

        def forward(self, x):
            weight = self.makes(self.seed).view(2, WIDTH)
            return torch.func.functional_call(self.layer, {"weight": weight + self.layer.weight}, (x,))

    torch.manual_seed(0)
    return trained(side, Model(), lr=0.05)


@idiom()
def complex_and_scalar_parameters(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gain = mlp(side), nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.body(x) * self.gain + self.empty.sum()

    return trained(side, Model())


@idiom(
    against="ddp",
    low=False,
    refused=(("zero 3", "all_gather cell .* a unit another number of times.* set strategy.accumulation to hold"),),
)
def a_cell_run_another_number_of_times_on_each_rank(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.cell = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x):
            x = self.first(x)
            for _ in range(1 + side.rank):
                x = x + self.other(self.cell(x))
            return self.head(x)

    torch.manual_seed(0)
    return trained(side, Model())


class Adjoint(torch.autograd.Function):
    """Of an ODE: backward computes it again, and asks torch.autograd.grad for the gradients of its parameters."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        for _ in range(3):
            x = x + 0.3 * function(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = x = x.detach().requires_grad_()
            for _ in range(3):
                y = y + 0.3 * ctx.function(y)
            return (None, *torch.autograd.grad(y, [x, *parameters], gradient))


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


@idiom()
def the_adjoint_of_an_ode(side: Side) -> Found:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function, self.head = mlp(side, outputs=WIDTH), nn.Linear(WIDTH, 2)
            self.function[1].requires_grad_(False)

        def forward(self, x):
            return self.head(Adjoint.apply(self.function, x, *filter(_is_trained, self.function.parameters())))

    torch.manual_seed(0)
    return trained(side, Model())
