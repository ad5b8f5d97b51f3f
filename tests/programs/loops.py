"""Random training loops, written once for whatever job runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.programs.adapter import Job
from tests.programs.blocks import WIDTH
from tests.programs.models import Deliberate, Drawn, ModelPlan, answer_of, answer_width, batch_of, build, loss_of

EPS = 1e-3
"""With torch's own, gradients that are zero but for rounding, such as those of attention's bias of keys, would become
updates large enough to be seen."""

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": EPS}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": EPS}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.005, "momentum": 0.5, "eps": EPS}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01, "eps": (EPS, EPS)}),
}


@dataclass(frozen=True)
class LoopPlan:
    """What a loop does; its defaults are the ordinary step: forward, backward, step, zero_grad."""

    steps: int = 3
    optimizer: str = "sgd"
    optimizers: Literal["one", "groups", "two", "alternate"] = "one"
    """groups: without decay for parameters of one dimension; two: one for every other parameter; alternate: and the
    second steps only in every other step."""
    zero_grad: Literal["none", "zeros", "model", "before", "never", "sometimes"] = "none"
    """After the step to None, to zeros or by the model; before the forward; never; or after every other step."""
    drops: bool = False
    """Whether what the first micro-batch left is dropped by zero_grad."""
    micro_batches: tuple[int, ...] = (1,)
    """How many a step has, on every rank or on each."""
    way: Literal["accumulate", "no_sync", "backwards", "uneven"] = "accumulate"
    passes: Literal["one", "two forwards", "retained", "summed"] = "one"
    """Of a micro-batch: two forwards and then two backwards, two backwards of one graph, or the sum of two losses."""
    scales: bool = False
    """Whether gradients are scaled by hand after the first micro-batch."""
    edits: Literal["none", "rows", "views", "noise", "centred", "decayed", "largest"] = "none"
    """What is done to whole gradients before the step: rows masked, elements written by way of views, noise, their mean
    or a share of the weights added, or their largest element clipped."""
    clip: float = 0.0
    regulariser: Literal["none", "before", "after", "apart before", "apart after"] = "none"
    """When the weights' squares and absolute values are summed: before or after the forward, to be added to the loss,
    or with a backward of their own before the forward or after the backward."""
    logging: Literal["none", "no grad", "grad"] = "none"
    """A forward between backward and step."""
    evaluates: Literal["none", "after", "between"] = "none"
    """A forward without gradients after each micro-batch, or between its forward and backward."""
    clamps: bool = False
    schedule: bool = False
    fails: Literal["", "forward", "backward"] = ""
    """An exception in the second step, after which the loop goes on."""
    reads: bool = False
    """Whether the state is read after every step."""
    average: bool = False
    """Whether a copy is made after the first step, which follows the model from then on."""
    teacher: Literal["none", "plain", "parallel"] = "none"
    """A frozen model that follows by hand and whose answer counts in the loss."""
    critic: bool = False
    """Whether a second parallel model stands behind the first, in one graph and with one optimizer."""


class Training:
    """One run of a loop over a model, in one job."""

    def __init__(self, model: ModelPlan, loop: LoopPlan, seed: int, dtype: torch.dtype, job: Job) -> None:
        """Builds the models and optimizers, and makes the models parallel."""
        self.plan, self.loop, self.seed, self.dtype, self.job = model, loop, seed, dtype, job
        self.model = build(model, seed).to(dtype)
        self.teacher = build(model, seed + 1).to(dtype).requires_grad_(False) if loop.teacher != "none" else None
        self.average: nn.Module | None = None
        self.nets = [job.parallel(self.model)]
        trained = list(self.model.parameters())
        self.teaching: Any = job.parallel(self.teacher) if loop.teacher == "parallel" else self.teacher
        if loop.critic:
            torch.manual_seed(seed + 2)
            critic = nn.Sequential(nn.Linear(answer_width(model), WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(dtype)
            self.nets.append(job.parallel(critic))
            trained += critic.parameters()
        self.optimizers = _optimizers(loop, trained)
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7) for optimizer in self.optimizers if loop.schedule
        ]

    def run(self) -> None:
        """All steps."""
        for step in range(self.loop.steps):
            if isinstance(self.model, Drawn):
                self.model.fails = self.loop.fails if step == 1 else ""
            try:
                self._gradients(step)
            except Deliberate:
                self.job.recover()
                continue
            self._update(step)
        if self.average is not None:
            state = self.average.state_dict()
            self.job.note("average", lambda rank: _flat(state.values()))

    def _gradients(self, step: int) -> None:
        loop, job = self.loop, self.job
        if loop.zero_grad == "before":
            self._zero_grad()
        if loop.regulariser == "apart before":
            self._penalty().backward()
        numbers = loop.micro_batches * (job.ranks if len(loop.micro_batches) == 1 else 1)
        for index in job.micro_batches(self.nets, numbers[: job.ranks], loop.way):
            self._passes(step, index, len(numbers))
            if loop.evaluates == "after":
                self._evaluate(step, "evaluated")
            if index == 0 and loop.scales:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            if index == 0 and loop.drops and max(numbers) > 1:
                self._zero_grad()
        if loop.regulariser == "apart after":
            self._penalty().backward()

    def _passes(self, step: int, index: int, share: int) -> None:
        passes, job = self.loop.passes, self.job
        before = self._penalty() if self.loop.regulariser == "before" else None

        def loss(place: int) -> Tensor:
            return job.loss(lambda rank: self._loss(step, index, rank, place, before) / share)

        first = loss(0)
        second = loss(1) if passes in ("two forwards", "summed") else None
        if self.loop.evaluates == "between":
            self._evaluate(step, "evaluated")
        if passes == "summed":
            (first + second).backward()
            return
        first.backward(retain_graph=passes == "retained")
        if passes == "retained":
            first.backward()
        if second is not None:
            second.backward()

    def _loss(self, step: int, index: int, rank: int, place: int, before: Tensor | None) -> Tensor:
        tokens, targets = batch_of(self.seed, step, index, rank, place)
        answer = answer_of(self.nets[0], self.plan, tokens, step, self.dtype)
        loss = loss_of(answer, self.model, self.plan, targets)
        if self.teaching is not None:
            with torch.no_grad():
                taught = answer_of(self.teaching, self.plan, tokens, step, self.dtype)
            loss = loss + (answer - taught).square().mean()
        for critic in self.nets[1:]:
            loss = loss + critic(answer).square().mean()
        if self.loop.regulariser == "after":
            loss = loss + self._penalty()
        return loss if before is None or place else loss + before

    def _penalty(self) -> Tensor:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # The absolute value itself would make rounding errors matter where a weight stays at about zero.
        absolutes = [(p.square() + 1e-2).sqrt().sum() for p in trained]
        return sum((0.01 * p.square().sum() for p in trained), 0.001 * torch.stack(absolutes).sum())

    def _evaluate(self, step: int, name: str, grad: bool = False) -> None:
        def answer(rank: int) -> Tensor:
            tokens, _ = batch_of(self.seed, step, 9, rank)
            return answer_of(self.nets[0], self.plan, tokens, step, self.dtype)

        self.model.eval()
        with torch.set_grad_enabled(grad):
            self.job.note(name, answer)
        self.model.train()
        self._drop_aux()

    def _drop_aux(self) -> None:
        if isinstance(self.model, Drawn):
            self.model.taken_aux()

    def _edit(self, step: int) -> None:
        edits, noise = self.loop.edits, torch.Generator().manual_seed(step)
        trained = [p for p in self.model.parameters() if p.grad is not None and p.numel()]
        if edits == "largest":
            norm = nn.utils.clip_grad_norm_(trained, 0.05, norm_type=torch.inf)
            self.job.note("largest", lambda rank: norm.detach().clone())
        for p in trained:
            if edits == "rows" and p.dim():
                p.grad[::2] *= 0.5
            elif edits == "views":
                p.grad.data.reshape(-1)[0] *= 2
                p.grad.mul_(1.5)
            elif edits == "noise":
                p.grad.add_(torch.randn(p.shape, generator=noise, dtype=p.grad.dtype), alpha=0.01)
            elif edits == "centred":
                p.grad -= p.grad.mean()
            elif edits == "decayed":
                p.grad.add_(p.detach(), alpha=0.01)

    def _zero_grad(self) -> None:
        if self.loop.zero_grad == "model":
            self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.loop.zero_grad != "zeros")

    def _update(self, step: int) -> None:
        loop, job = self.loop, self.job
        if loop.logging != "none":
            self._evaluate(step, "logged", grad=loop.logging == "grad")
        self._edit(step)
        if loop.clip:
            norm = job.clip(self.model, loop.clip)
            job.note("norm", lambda rank: norm)
        for number, optimizer in enumerate(self.optimizers):
            if not (loop.optimizers == "alternate" and number == 1 and step % 2 == 1):
                optimizer.step()
                job.changed()
        for schedule in self.schedules:
            schedule.step()
        if loop.zero_grad in ("none", "zeros", "model") or (loop.zero_grad == "sometimes" and step % 2 == 1):
            self._zero_grad()
        if loop.clamps:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    # What nobody updates each rank may edit, also where the others' edits are refused.
                    if parameter.requires_grad:
                        parameter.clamp_(-0.6, 0.6)
            job.changed()
        if self.teacher is not None:
            for theirs, ours in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                theirs.data.mul_(0.8).add_(ours.data, alpha=0.2)
            job.changed()
        if loop.reads:
            state = self.model.state_dict()
            job.note("state", lambda rank: _flat(state.values()))
        if loop.average and self.average is None:
            # What a block keeps for a loss has a graph, which torch does not copy.
            self._drop_aux()
            self.average = job.copied(self.model)
        elif self.average is not None:
            state = self.model.state_dict()
            for name, value in self.average.state_dict().items():
                value.lerp_(state[name].to(value.dtype), 0.3)


def _optimizers(loop: LoopPlan, trained: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    cls, settings = OPTIMIZERS[loop.optimizer]
    if loop.optimizer == "adafactor":
        # It divides by the number of elements.
        trained = [p for p in trained if p.numel()]
    if loop.optimizers in ("two", "alternate"):
        other = OPTIMIZERS["adamw" if loop.optimizer == "sgd" else "sgd"]
        halves = [(cls, settings, trained[::2]), (*other, trained[1::2])]
        return [kind(part, **chosen) for kind, chosen, part in halves if part]
    if loop.optimizers == "groups":
        groups = [[p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]]
        decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
        return [cls([group for group in decays if group["params"]], **{**settings, "weight_decay": 0.0})]
    return [cls(trained, **settings)]


def _flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().cpu().flatten() for value in values])
