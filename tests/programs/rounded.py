"""How far rounding alone takes a program: one process that computes with bfloat16 copies of its float32 weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.programs.adapter import Plain, Weights, state_of
from tests.programs.loops import Training
from tests.programs.outcome import furthest
from tests.programs.program import Program

RUNS = 4
ROUNDING = 1e-3
"""How far, relative, the weights of all runs but the first begin from the program's: less than bfloat16 tells apart."""


class Rounded(Plain):
    """One process that plays all ranks, in low precision.

    Unlike ranks it also adds up in bfloat16 what ranks and micro-batches give.
    """

    def __init__(self, ranks: int, run: int) -> None:
        super().__init__(ranks)
        self._generator = torch.Generator().manual_seed(run)
        self._shake = ROUNDING if run else 0.0
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor | None] = {}

    def parallel(self, model: nn.Module) -> Any:
        for parameter in model.parameters():
            shaken = 1 + self._shake * torch.randn(parameter.shape, generator=self._generator)
            self._masters[parameter] = parameter.detach() * shaken
            parameter.data = self._masters[parameter]
        model.bfloat16()
        model.register_forward_pre_hook(lambda module, args: tuple(map(_low, args)))
        return super().parallel(model)

    def weights(self) -> Weights:
        states = []
        for model in self.models:
            masters = {n: self._masters[p].clone() for n, p in model.named_parameters(remove_duplicate=False)}
            states.append({**state_of(model), **masters})
        return states

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What is updated are float32 weights."""
        for parameter in _updated(optimizer):
            gradient = self._gradients[parameter] = parameter.grad
            parameter.grad = None
            parameter.data = self._masters[parameter]
            parameter.grad = None if gradient is None else gradient.float()

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """What is computed with is rounded from them."""
        for parameter in _updated(optimizer):
            parameter.grad = None
            self._masters[parameter] = parameter.data
            parameter.data = parameter.data.bfloat16()
            parameter.grad = self._gradients.pop(parameter)


def rounding_alone(program: Program, reference: Plain) -> tuple[float, float]:
    """How far several runs in one process and low precision are at most from the reference: weights, and notes."""
    found = []
    for run in range(RUNS):
        job = Rounded(program.ranks, run)
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(job.before_step).remove)
            stack.callback(register_optimizer_step_post_hook(job.after_step).remove)
            Training(program.model, program.loop, program.seed, torch.float32, job).run()
        found.append(furthest(job.states[-1], job.notes, reference))
    return max(weights for weights, _ in found), max(notes for _, notes in found)


def _low(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _updated(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
