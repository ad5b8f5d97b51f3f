"""What one process can tell beforehand: whether the model can be compared at all, and with which batches."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from paceline.core.errors import UserError
from paceline.verify.model_spec import (
    Batch,
    ModelSpec,
    compute_loss,
    find_loss,
    make_batches,
    make_model,
    rows_of,
    share,
)
from paceline.verify.reference_run import batches_file, save_tensors


@dataclass(frozen=True)
class Prepared:
    """What one process found."""

    spec: ModelSpec
    """As it will be run: in float32 where the model cannot do float64."""
    micro_batches: tuple[int, ...]
    """Numbers of micro-batches that the batches can be cut into."""
    bytes: int
    """Size of all trainable parameters."""
    obstacles: tuple[str, ...] = ()
    """Why N ranks cannot equal one process under any engine."""
    notes: tuple[str, ...] = ()
    """What a reader of the result should know."""
    changing: tuple[str, ...] = ()
    """Buffers that a training forward changes: each rank has its own."""


def prepare(spec: ModelSpec, ranks: int, micro_batches: Sequence[int], steps: int, folder: Path) -> Prepared:
    """Builds the model, writes the batches to the folder, and looks for what makes ranks differ.

    Args:
        spec: What is to be verified.
        ranks: Number of ranks.
        micro_batches: Numbers of micro-batches that are wished for.
        steps: Number of optimizer steps.
        folder: Where to write.

    Raises:
        UserError: The model cannot be built twice alike, or cannot be trained on a part of a batch, or batches cannot
            be cut for the ranks.
    """
    model = make_model(spec)
    _require_same(model, make_model(spec))
    rows = 2 * ranks * int(np.lcm.reduce(list(micro_batches)))
    batches = make_batches(spec, model, steps, rows)
    possible = _possible(batches, ranks, micro_batches)
    notes = []
    if left := [str(m) for m in micro_batches if m not in possible]:
        notes.append(
            f"not with {' or '.join(left)} micro-batches: batches of {rows_of(batches[0])} samples cannot be cut so"
        )
    spec, model, batches, noted = _runnable(spec, model, batches, ranks * max(possible))
    save_tensors(batches_file(folder), batches)
    part = share(batches[0], 0, ranks * max(possible))
    return Prepared(
        spec,
        possible,
        sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad),
        (*_batch_norms(model), *_randomness(spec, model, part)),
        (*notes, *noted),
        _changing_buffers(spec, model, part),
    )


def _require_same(one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    different = [name for name in {**first, **second} if name not in first or name not in second]
    different += [
        name
        for name in first.keys() & second.keys()
        if isinstance(first[name], Tensor) and not torch.equal(first[name], second[name])
    ]
    if different:
        names = [name for name in {**first, **second} if name in different]
        raise UserError(
            f"build gives another model when it is called twice under the same seed; the first difference is "
            f"{names[0]}, of {len(names)}. Draw its weights from torch's, numpy's or random's global generator, or "
            "from one that build itself seeds"
        )


def _possible(batches: Sequence[Batch], ranks: int, micro_batches: Sequence[int]) -> tuple[int, ...]:
    sizes = sorted({rows_of(batch) for batch in batches})
    possible = tuple(m for m in micro_batches if all(size and size % (ranks * m) == 0 for size in sizes))
    if not possible:
        raise UserError(
            f"batches of {', '.join(map(str, sizes))} samples cannot be cut into equal parts for {ranks} ranks and "
            f"{' or '.join(map(str, micro_batches))} micro-batches: give batches of a multiple of "
            f"{ranks * min(micro_batches)} samples, or change --workers or --micro-batches"
        )
    return possible


def _runnable(
    spec: ModelSpec, model: nn.Module, batches: list[Batch], parts: int
) -> tuple[ModelSpec, nn.Module, list[Batch], list[str]]:
    """The model in float64 if it can be run so, else in float32."""
    problem = _problem(spec, model, share(batches[0], 0, parts))
    if problem is None:
        return spec, model, batches, []
    if spec.dtype == "float64":
        narrow = replace(spec, dtype="float32")
        model, narrowed = make_model(narrow), [_converted(batch) for batch in batches]
        if _problem(narrow, model, share(narrowed[0], 0, parts)) is None:
            return narrow, model, narrowed, [f"in float32, as the model cannot do float64: {_last_line(problem)}"]
    called = f" ({spec.loss} is called with what the model returns, and the whole batch)" if spec.loss else ""
    raise UserError(f"one process alone cannot train the model on a part of the first batch{called}:\n{problem}")


def _problem(spec: ModelSpec, model: nn.Module, part: Batch) -> str | None:
    """The traceback of a forward and backward pass; None if they run."""
    before = _state(model)
    try:
        compute_loss(model, part, find_loss(spec)).backward()
    except UserError:
        raise
    except Exception:
        # Whatever the user's own code raises is shown.
        return traceback.format_exc().rstrip()
    finally:
        model.zero_grad()
        _restore(model, before)
    return None


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2]


def _converted(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.float() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: _converted(value) for name, value in batch.items()}
    return tuple(map(_converted, batch)) if isinstance(batch, tuple) else batch


def _batch_norms(model: nn.Module) -> list[str]:
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    if not names:
        return []
    return [
        f"{_some(names)} normalise over the samples of a batch. Each rank normalises its own part by that part's mean "
        "and variance, and keeps its own running statistics, so N ranks train another function than one process "
        "does. Use GroupNorm or LayerNorm, or verify the rest of the model with --eval, which uses the running "
        "statistics"
    ]


def _randomness(spec: ModelSpec, model: nn.Module, part: Batch) -> list[str]:
    """Whether the loss depends on random numbers."""
    losses = []
    for seed in (1, 2):
        before = _state(model)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with torch.enable_grad():
            losses.append(compute_loss(model, part, find_loss(spec)).item())
        _restore(model, before)
    if losses[0] == losses[1]:
        return []
    names = [name for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0 and m.training]
    names += [f"{name}.dropout" for name, m in model.named_modules() if _drops_inside(m)]
    what = f"{_some(names)} drop" if names else "forward draws"
    return [
        f"{what} at random: the same samples gave the losses {losses[0]:.6g} and {losses[1]:.6g} under two seeds. "
        "Ranks draw other random numbers than one process, so no two runs are equal. Set p=0 in build, or verify "
        "with --eval, which turns dropout off"
    ]


def _drops_inside(module: nn.Module) -> bool:
    probability = getattr(module, "dropout", 0)
    return module.training and isinstance(probability, float) and probability > 0


def _changing_buffers(spec: ModelSpec, model: nn.Module, part: Batch) -> tuple[str, ...]:
    before = _state(model)
    compute_loss(model, part, find_loss(spec))
    changed = tuple(name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name]))
    _restore(model, before)
    return changed


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _restore(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in state and buffer.shape == state[name].shape:
            buffer.copy_(state[name])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
