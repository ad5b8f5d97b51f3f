"""The reference: a plain loop in one process, without the engine, that writes down what every step has."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.core.errors import UserError
from paceline.models.units import find_units
from paceline.verify.deviation import largest
from paceline.verify.model_spec import Batch, Loss, ModelSpec, compute_loss, find_loss, make_model, share
from paceline.verify.recipe import Recipe, make_optimizer

Named = dict[str, Tensor]


@lru_cache(maxsize=32)
def load_tensors(path: Path) -> Any:
    """What `save_tensors` wrote; tensors stay on disk until they are used, and are not to be changed."""
    return torch.load(path, mmap=True, weights_only=True)


def save_tensors(path: Path, values: Any) -> None:
    """Writes tensors in plain containers, in one piece: a process that reads the file's former content may go on."""
    torch.save(values, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def batches_file(folder: Path) -> Path:
    """Holds the global batches of all steps."""
    return folder / "batches.pt"


def step_file(folder: Path, recipe: Recipe, step: int) -> Path:
    """Holds the weights before a step, its losses, gradients and their norm."""
    return folder / recipe.name / f"step-{step}.pt"


def parts_file(folder: Path, recipe: Recipe, step: int) -> Path:
    """Holds what each rank and micro-batch adds to an inspected step."""
    return folder / recipe.name / f"parts-{step}.pt"


class Parts:
    """What each rank's micro-batches, the parts of a global batch, add to a step.

    Attributes:
        gradients: By part, each parameter's gradient.
        outputs: By part, the name and the fingerprint of the output of each unit in the order of their calls.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self.gradients: list[Named] = [{} for _ in range(count)]
        self.outputs: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
        self._index = 0
        self._handles = [
            module.register_forward_hook(lambda module, inputs, output, name=name: self._take(name, output))
            for name, module in find_units(model).items()
        ]

    def _take(self, unit: str, output: Any) -> None:
        self.outputs[self._index].append((unit, fingerprint(output)))

    def begin(self, index: int) -> None:
        """A part's forward is about to begin."""
        self._index = index

    def end(self, gradients: Named) -> None:
        """Its backward is over."""
        self.gradients[self._index] = {name: gradient.clone() for name, gradient in gradients.items()}

    def close(self) -> dict[str, Any]:
        """Removes the hooks; returns everything in plain containers."""
        for handle in self._handles:
            handle.remove()
        return {"gradients": self.gradients, "outputs": self.outputs}


def fingerprint(output: Any) -> Tensor:
    """A few numbers that stand for all floating-point tensors in a module's output, order of elements included.

    Returns:
        fp64, shape (2 * tensors,).
    """
    numbers = []
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            flat = tensor.detach().double().flatten()
            weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64)
            numbers += [flat.abs() @ weights, flat @ weights]
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64)


def train_reference(spec: ModelSpec, recipe: Recipe, folder: Path, inspect: int | None = None) -> None:
    """Trains as one process and writes a file a step: what every rank of a parallel job is compared with.

    The global batch is cut as ranks and micro-batches cut it, and gradients are the mean over ranks of the mean over
    micro-batches. In low precision, forward and backward use copies of fp32 weights.

    Args:
        spec: What is trained.
        recipe: How.
        folder: Where the batches are, and where to write.
        inspect: A step of which the parts are written as well.

    Raises:
        UserError: A loss or norm is not finite.
    """
    (folder / recipe.name).mkdir(exist_ok=True)
    master = make_model(spec)
    computing = _lowered(master, recipe.precision)
    optimizer = make_optimizer(master.parameters())
    loss = find_loss(spec)
    for step, batch in enumerate(load_tensors(batches_file(folder))[: recipe.steps]):
        _copy_weights(master, computing)
        parts = Parts(computing, recipe.ranks * recipe.micro_batches) if step == inspect else None
        losses, gradients = _forward_and_backward(computing, batch, recipe, loss, parts)
        if parts is not None:
            save_tensors(parts_file(folder, recipe, step), parts.close())
        for name, parameter in master.named_parameters():
            parameter.grad = gradients.get(name)
        record = {
            "weights": _weights(master),
            "losses": losses,
            "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
            "scale": max(map(largest, gradients.values()), default=0.0),
            "norm": torch.nn.utils.clip_grad_norm_(master.parameters(), recipe.max_norm).item(),
        }
        if not torch.tensor([*losses, record["norm"]]).isfinite().all():
            raise UserError(
                f"in one process, step {step} has the losses {losses} and the gradient norm {record['norm']}: there "
                "is nothing to compare with. Give weights and batches that train"
            )
        save_tensors(step_file(folder, recipe, step), record)
        optimizer.step()
        optimizer.zero_grad()
    save_tensors(step_file(folder, recipe, recipe.steps), {"weights": _weights(master)})


def _weights(model: nn.Module) -> Named:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _lowered(master: nn.Module, precision: str) -> nn.Module:
    """The model to compute with: the master itself, or a copy whose parameters are of low precision."""
    if precision == "float32":
        return master
    low = copy.deepcopy(master)
    for parameter in low.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, precision))
    return low


@torch.no_grad()
def _copy_weights(master: nn.Module, computing: nn.Module) -> None:
    if computing is not master:
        for source, target in zip(master.parameters(), computing.parameters(), strict=True):
            target.copy_(source)


def _forward_and_backward(
    model: nn.Module, batch: Batch, recipe: Recipe, loss: Loss | None, parts: Parts | None
) -> tuple[list[float], Named]:
    """The loss of each part, and the gradients of their mean; no gradient where no part has one."""
    ranks, micro_batches = recipe.ranks, recipe.micro_batches
    losses = [0.0] * (ranks * micro_batches)

    def one(rank: int, micro_batch: int) -> Named:
        index = rank * micro_batches + micro_batch
        if parts is not None:
            parts.begin(index)
        model.zero_grad(set_to_none=True)
        value = compute_loss(model, share(batch, index, len(losses)), loss)
        (value / micro_batches).backward()
        losses[index] = value.item()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if parts is not None:
            parts.end(gradients)
        # Low precision is left behind before anything is summed.
        return {name: g.float() if g.itemsize < 4 else g for name, g in gradients.items()}

    def mean_of(group: Sequence[int]) -> Named:
        """What some ranks add to the mean over all, summed in the order in which they would."""
        parts = range(micro_batches)
        if recipe.each:
            return _sum([_scaled(_sum([one(rank, index) for rank in group]), 1 / ranks) for index in parts])
        return _scaled(_sum([_sum([one(rank, index) for index in parts]) for rank in group]), 1 / ranks)

    size = recipe.group or ranks
    return losses, _sum([mean_of(range(first, first + size)) for first in range(0, ranks, size)])


def _scaled(values: Named, factor: float) -> Named:
    for value in values.values():
        value.mul_(factor)
    return values


def _sum(terms: Sequence[Named]) -> Named:
    """The sum, in order, in the memory of the terms."""
    total: Named = {}
    for term in terms:
        for name, value in term.items():
            total[name] = total[name].add_(value) if name in total else value
    return total
