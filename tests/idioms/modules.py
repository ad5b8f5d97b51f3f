"""What models are made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.idioms.side import WIDTH, Found, Side, fit, idiom, mlp, state


def trained(side: Side, model: nn.Module, lr: float = 0.1, steps: int = 3) -> Found:
    model = model.to(side.dtype)
    net = side.parallel(model)
    fit(side, net, torch.optim.SGD(model.parameters(), lr), steps)
    return evaluated(side, net, model)


def evaluated(side: Side, net: Any, model: nn.Module) -> Found:
    """Weights, buffers and losses in evaluation, before which DDP sends rank 0's buffers to all."""
    model.eval()
    with torch.no_grad():
        x, y = side.batch(99)
        answer = net(x)
        loss = side.mean(((answer[0] if isinstance(answer, tuple) else answer) - y).square().mean())
    return {**state(model), "loss": loss}


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


@idiom(low=False)
def orthogonal_weights(side: Side) -> Found:
    torch.manual_seed(0)
    turned = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH).to(side.dtype))
    return trained(side, nn.Sequential(turned, nn.Tanh(), nn.Linear(WIDTH, 2)))


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
    for step in range(4):
        x, y = side.batch(step)
        answer, commitment = net(x)
        ((answer - y).square().mean() + commitment).backward()
        optimizer.step()
        optimizer.zero_grad()
    return evaluated(side, net, model)


@idiom(against="ddp", off=0.2)
def a_centre_that_is_subtracted(side: Side) -> Found:
    """DINO's centre, replaced and not written to."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(side)
            self.register_buffer("centre", torch.zeros(2))

        def forward(self, x):
            x = self.body(x)
            answer = (x - self.centre.to(x.dtype)).tanh()
            if self.training:
                self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0).to(self.centre.dtype)
            return answer

    return trained(side, Centred(), steps=4)


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
    for step, depth in enumerate((3, 1, 2, 3)):
        x, y = side.batch(step)
        (net(x, depth) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


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
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        for x, y in side.micro_batches(net, step):
            loss = (net(x) - y).square().mean() + 0.1 * sum(block.balance for block in model.blocks)
            loss.div(side.micro).backward()
        optimizer.step()
        optimizer.zero_grad()
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
