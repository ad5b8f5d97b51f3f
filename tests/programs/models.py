"""Random models, and the loss of one on a batch, which may use parameters outside of the model's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs.blocks import KINDS, WIDTH, Block

VOCABULARY = 7
LENGTH = 3
Batch = tuple[Tensor, Tensor]


class Deliberate(Exception):
    """What programs raise on purpose."""


@dataclass(frozen=True)
class ModelPlan:
    """What a model is made of; its defaults are an ordinary small one."""

    whole: Literal["", "attention", "linear", "sequential"] = ""
    """The model is one module of torch's, and the rest of this plan does not count."""
    blocks: tuple[str, ...] = ("linear", "mlp", "linear")
    container: Literal["list", "dict", "attributes", "sequential"] = "list"
    calls: tuple[int, ...] = ()
    """Which block is called when, the same perhaps twice; empty: each once, in order."""
    branch: Literal["none", "step", "data"] = "none"
    """By what it is decided whether the last call is left out: alike on all ranks, or each by its own data."""
    embedding: Literal["table", "frozen", "one-hot"] = "table"
    positions: Literal["none", "view", "late view", "root"] = "none"
    """Learned positions: a unit that returns a view of them, added at once or after all blocks; or a parameter of the
    model itself."""
    frozen: int = -1
    """Index of a block without gradients."""
    given: Literal["none", "layer", "network", "network called alone"] = "none"
    """A module of the model's that every block is given and calls in the middle of its forward."""
    head: Literal["inside", "tied", "outside", "tied outside"] = "inside"
    outside: Literal["none", "temperature", "logit scale", "method", "loss weights"] = "none"
    """A parameter of the model itself that is used after its forward."""


class Positions(nn.Module):
    """Returns the first rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH))

    def forward(self, length: int) -> Tensor:
        return self.table[:length]


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(F.one_hot(tokens, VOCABULARY).to(self.linear.weight.dtype))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise Deliberate("in the middle of backward")


class Drawn(nn.Module):
    """A model as a plan describes it: tokens (batch, LENGTH) to hidden states or, with a head inside, to logits."""

    fails: Literal["", "forward", "backward"] = ""

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__()
        self.plan = plan
        self.embed = OneHot() if plan.embedding == "one-hot" else nn.Embedding(VOCABULARY, WIDTH)
        self.embed.requires_grad_(plan.embedding != "frozen")
        if "view" in plan.positions:
            self.positions = Positions()
        if plan.positions == "root":
            self.places = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).reshape(LENGTH, WIDTH))
        blocks = [KINDS[kind]() for kind in plan.blocks]
        if plan.frozen >= 0:
            blocks[plan.frozen].requires_grad_(False)
        if plan.given != "none":
            network = (nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
            self.given = nn.Linear(WIDTH, WIDTH) if plan.given == "layer" else nn.Sequential(*network)
            for block in blocks:
                block.given = (self.given,)
        if plan.container == "list":
            self.blocks = nn.ModuleList(blocks)
        elif plan.container == "dict":
            self.blocks = nn.ModuleDict({f"block{i}": block for i, block in enumerate(blocks)})
        elif plan.container == "sequential":
            self.blocks = nn.Sequential(*blocks)
        else:
            for i, block in enumerate(blocks):
                self.add_module(f"block{i}", block)
        self.norm = nn.LayerNorm(WIDTH)
        if not plan.head.startswith("tied"):
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if plan.outside in ("temperature", "logit scale", "method"):
            self.temperature = nn.Parameter(torch.tensor(0.3))
        if plan.outside == "loss weights":
            self.loss_weights = nn.Parameter(torch.tensor([0.2, -0.1]))

    def _blocks(self) -> list[Block]:
        if self.plan.container == "attributes":
            return [getattr(self, f"block{i}") for i in range(len(self.plan.blocks))]
        return list(self.blocks.values() if self.plan.container == "dict" else self.blocks)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        plan, later = self.plan, []
        x = self.embed(tokens)
        positions = self.positions(LENGTH) if "view" in plan.positions else None
        if plan.positions == "view":
            x = x + positions
        if plan.positions == "root":
            x = x + self.places
        if plan.given == "network called alone":
            x = x + self.given(x)
        if plan.container == "sequential":
            x = self._failing(self.blocks(x))
        else:
            blocks, calls = self._blocks(), list(plan.calls or range(len(plan.blocks)))
            skips = (plan.branch == "step" and step % 2 == 1) or (plan.branch == "data" and int(tokens.sum()) % 2 == 1)
            for number, index in enumerate(calls[:-1] if skips else calls):
                x = blocks[index].use(x, later)
                if number == 0:
                    x = self._failing(x)
        for view in later:
            x = x * view
        if plan.positions == "late view":
            x = x + positions
        x = self.norm(x)
        if plan.head == "inside":
            return self.head(x)
        return x @ self.embed.weight.T if plan.head == "tied" else x

    def _failing(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise Deliberate("in the middle of forward")
        return _Fails.apply(x) if self.fails == "backward" else x

    def tempered(self, logits: Tensor) -> Tensor:
        """Reads a parameter of the model's own in another method than forward."""
        return logits * self.temperature.exp()

    def taken_aux(self) -> list[Tensor]:
        """The auxiliary losses that blocks kept in the last forward, which are gone then."""
        found = []
        for module in self.modules():
            if getattr(module, "aux", None) is not None:
                found.append(module.aux)
                module.aux = None
        return found


def build(plan: ModelPlan, seed: int) -> nn.Module:
    """The model with weights that follow from a seed, in torch's default precision."""
    torch.manual_seed(seed)
    if plan.whole == "attention":
        return nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    if plan.whole == "linear":
        return nn.Linear(WIDTH, VOCABULARY)
    if plan.whole == "sequential":
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Drawn(plan)


def batch_of(seed: int, *place: int) -> Batch:
    """Tokens and targets (2, LENGTH) of one rank's micro-batch, which follow from numbers that say where it is."""
    for number in place:
        seed = seed * 1009 + number + 1
    generator = torch.Generator().manual_seed(seed % 2**62)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator)
    return tokens, targets


def answer_of(net: Callable[..., Tensor], plan: ModelPlan, tokens: Tensor, step: int, dtype: torch.dtype) -> Tensor:
    """What calling the model, or what stands for it such as DDP around it, gives for tokens."""
    if not plan.whole:
        return net(tokens, step)
    x = F.one_hot(tokens % WIDTH, WIDTH).to(dtype) + torch.linspace(-1, 1, WIDTH, dtype=dtype)
    return net(x, x, x)[0] if plan.whole == "attention" else net(x)


def answer_width(plan: ModelPlan) -> int:
    """The last dimension of what `answer_of` gives."""
    hidden = plan.whole == "attention" or (not plan.whole and "outside" in plan.head)
    return WIDTH if hidden else VOCABULARY


def loss_of(answer: Tensor, model: nn.Module, plan: ModelPlan, targets: Tensor) -> Tensor:
    """The loss of one rank, by its model's answer and what the model keeps for it."""
    if plan.whole == "attention":
        return answer.float().square().mean() if answer.dtype == torch.bfloat16 else answer.square().mean()
    if not isinstance(model, Drawn):
        return _cross_entropy(answer, targets)
    if plan.outside == "logit scale":
        return _contrasted(answer.flatten(1), model.temperature)
    head = {"outside": "head", "tied outside": "embed"}.get(plan.head)
    if head:
        weight = getattr(model, head).weight
        parts = [F.linear(part, weight) for part in answer.split(1)]
    else:
        parts = [answer]
    if plan.outside == "temperature":
        parts = [part * model.temperature.exp() for part in parts]
    if plan.outside == "method":
        parts = [model.tempered(part) for part in parts]
    wanted = targets.split(1) if head else [targets]
    losses = torch.stack([_cross_entropy(part, target) for part, target in zip(parts, wanted, strict=True)])
    loss = losses.mean()
    if plan.outside == "loss weights":
        loss = (model.loss_weights.exp() * torch.stack([loss, answer.square().mean()])).sum()
        loss = loss - model.loss_weights.sum()
    return loss + sum(0.1 * aux for aux in model.taken_aux())


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _contrasted(features: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss between the samples of a batch and themselves, shifted."""
    features = F.normalize(features, dim=-1)
    scores = features @ features.roll(1, -1).T * scale.exp()
    return F.cross_entropy(scores, torch.arange(len(features)))
