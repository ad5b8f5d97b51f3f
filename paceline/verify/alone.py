"""The reference: a plain loop in one process, without the engine, that writes down what every step has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.units import find_units
from paceline.errors import UserError
from paceline.verify.measure import largest
from paceline.verify.recipe import MAX_NORM, Recipe, make_optimizer
from paceline.verify.subject import Batch, Loss, Subject, compute_loss, find_loss, make_model, share

Named = dict[str, Tensor]

BATCHES = "batches.pt"


def read(path: Path) -> Any:
    """What `write` wrote; tensors stay on disk until they are used."""
    return torch.load(path, mmap=True, weights_only=True)


def write(path: Path, values: Any) -> None:
    """Writes tensors in plain containers."""
    torch.save(values, path)


def step_file(folder: Path, step: int) -> Path:
    """Holds the weights before a step, its losses, gradients and their norm."""
    return folder / f"step-{step}.pt"


def parts_file(folder: Path, step: int) -> Path:
    """Holds what each rank and micro-batch adds to an inspected step."""
    return folder / f"parts-{step}.pt"


def train_alone(subject: Subject, recipe: Recipe, batches: Path, folder: Path, inspect: int | None = None) -> None:
    """Trains as one process and writes a file a step: what every rank of a parallel job is compared with.

    The global batch is cut as ranks and micro-batches cut it, and gradients are the mean over ranks of the mean over
    micro-batches. In low precision, forward and backward use copies of fp32 weights.

    Args:
        subject: What is trained.
        recipe: How.
        batches: File of the global batches.
        folder: Where to write; made if it is not there.
        inspect: A step of which the parts are written as well: per rank and micro-batch each parameter's gradient and
            what each unit's forward gives.

    Raises:
        UserError: A loss or norm is not finite.
    """
    folder.mkdir(exist_ok=True)
    master = make_model(subject)
    computing = _lowered(master, recipe.precision)
    optimizer = make_optimizer(master.parameters())
    loss = find_loss(subject)
    for step, batch in enumerate(read(batches)[: recipe.steps]):
        _copy_weights(master, computing)
        with _collecting(computing, step == inspect) as parts:
            losses, gradients = _one_step(computing, batch, recipe, loss, parts)
        if step == inspect:
            write(parts_file(folder, step), parts)
        for name, parameter in master.named_parameters():
            parameter.grad = gradients.get(name)
        record = {
            "weights": _weights(master),
            "losses": torch.tensor(losses, dtype=torch.float64),
            "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
            "scale": max(map(largest, gradients.values()), default=0.0),
            "norm": torch.nn.utils.clip_grad_norm_(master.parameters(), MAX_NORM).item(),
        }
        if not (record["losses"].isfinite().all() and torch.tensor(record["norm"]).isfinite()):
            raise UserError(
                f"in one process, step {step} has the losses {losses} and the gradient norm {record['norm']}: there "
                "is nothing to compare with. Give batches and weights that train"
            )
        write(step_file(folder, step), record)
        optimizer.step()
        optimizer.zero_grad()
    write(step_file(folder, recipe.steps), {"weights": _weights(master)})


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


def _copy_weights(master: nn.Module, computing: nn.Module) -> None:
    if computing is not master:
        with torch.no_grad():
            for source, target in zip(master.parameters(), computing.parameters(), strict=True):
                target.copy_(source)


@contextmanager
def _collecting(model: nn.Module, wanted: bool) -> Iterator[dict[str, list[list[Any]]] | None]:
    """Inside, what units give is taken down, by rank and micro-batch, if it is wanted."""
    if not wanted:
        yield None
        return
    parts: dict[str, list[list[Any]]] = {"gradients": [], "outputs": []}

    def ends(name: str, output: Any) -> None:
        parts["outputs"][-1][-1].append((name, fingerprint(output)))

    handles = [
        module.register_forward_hook(lambda module, inputs, output, name=name: ends(name, output))
        for name, module in find_units(model).items()
    ]
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def fingerprint(output: Any) -> Tensor:
    """A few numbers that stand for all floating-point tensors in a module's output, their order included.

    Returns:
        fp64, shape (2 * tensors,).
    """
    numbers = []
    for tensor in torch.utils._pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            flat = tensor.detach().double().flatten()
            weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64)
            numbers += [flat.abs() @ weights, flat @ weights]
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64)


def _one_step(
    model: nn.Module, batch: Batch, recipe: Recipe, loss: Loss | None, parts: dict[str, list[list[Any]]] | None
) -> tuple[list[list[float]], Named]:
    """Losses by rank and micro-batch, and the step's gradients by parameter, None where no part has one."""
    losses = [[0.0] * recipe.micro_batches for _ in range(recipe.ranks)]
    if parts is not None:
        for kind in parts:
            parts[kind] = [[{} if kind == "gradients" else []] * 0 for _ in range(recipe.ranks)]

    def gradients(rank: int, micro_batch: int) -> Named:
        index = rank * recipe.micro_batches + micro_batch
        if parts is not None:
            parts["outputs"][rank].append([])
        model.zero_grad(set_to_none=True)
        value = compute_loss(model, share(batch, index, recipe.ranks * recipe.micro_batches), loss)
        (value / recipe.micro_batches).backward()
        losses[rank][micro_batch] = value.item()
        return {}

    return losses, gradients(0, 0)
