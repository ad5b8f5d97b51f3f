"""What is verified: the user's model, batches and loss, found by name and called the same way everywhere."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.models.transformer import Transformer

Batch = Tensor | tuple[Any, ...] | dict[str, Any]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class ModelSpec:
    """The model under test, by names, so that every process can build it."""

    build: str
    """module:function that returns the model."""
    data: str = ""
    """module:name of a function of the step, or of an iterable, that gives batches."""
    loss: str = ""
    """module:function of (output, batch)."""
    dtype: str = "float64"
    """Floating-point parameters, buffers and batches are converted to it."""
    evaluation: bool = False
    """Whether the model is put in evaluation mode."""


def find(reference: str, option: str) -> Any:
    """What `module:name` names.

    Raises:
        UserError: It is not of that form, or there is no such module or name in it.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name or module_name.endswith(".py") or "/" in module_name:
        raise UserError(f"{option}: expected module:name, such as my_module:build, got {reference!r}")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"{option}: there is no module {error.name!r} in {os.getcwd()} or among the installed packages"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{option}: {module_name} has no {name!r}{hint}")
        found = getattr(found, part)
    return found


def make_model(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """Builds the model from a seed.

    Raises:
        UserError: `build` gave something else than a module.
    """
    build = find(spec.build, "build")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = build()
    if not isinstance(model, nn.Module):
        raise UserError(f"{spec.build} must return a torch.nn.Module, got {type(model).__name__}")
    model.to(getattr(torch, spec.dtype))
    return model.eval() if spec.evaluation else model


def make_batches(spec: ModelSpec, model: nn.Module, steps: int, rows: int) -> list[Batch]:
    """The global batches of all steps.

    Args:
        spec: Says where they come from.
        model: Without data given, what batches are made up for, if its kind is known.
        steps: Number of batches.
        rows: Samples of a batch that is made up.

    Raises:
        UserError: There are fewer, or they are no batches, or none were given and the model's kind is not known.
    """
    if not spec.data:
        given = [_made_up(model, step, rows) for step in range(steps)]
    else:
        source = find(spec.data, "--data")
        if callable(source) and _takes(source, 0):
            given = [source(step) for step in range(steps)]
        else:
            given = list(islice(iter(source() if callable(source) else source), steps))
    if len(given) < steps:
        raise UserError(f"{spec.data} gave {len(given)} batches, but {steps} steps need as many; lower --steps")
    return [_plain(batch, getattr(torch, spec.dtype)) for batch in given]


def _made_up(model: nn.Module, step: int, rows: int) -> Batch:
    """Random tokens for a model that says how many there are."""
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, Transformer):
        shape = (rows, min(model.config.context, 32))
        return tuple(torch.randint(model.config.vocabulary, shape, generator=generator) for _ in range(2))
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    names = inspect.signature(model.forward).parameters
    if isinstance(vocabulary, int) and {"input_ids", "labels"} <= set(names):
        longest = min(32, getattr(config, "max_position_embeddings", None) or 32)
        tokens = torch.randint(vocabulary, (rows, longest), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}
    raise UserError(
        f"no batch can be made up for {type(model).__name__}: give --data module:function, where function(step) "
        "returns a tensor, a tuple or a dict of tensors whose first dimension is the samples"
    )


def _plain(batch: Any, dtype: torch.dtype) -> Any:
    """The batch in plain containers, its floating-point tensors in `dtype`."""
    if isinstance(batch, Tensor):
        batch = batch.detach().cpu()
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {str(name): _plain(value, dtype) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_plain(value, dtype) for value in batch)
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch
    raise UserError(f"a batch is a tensor, a tuple or a dict of tensors; it holds {type(batch).__name__}")


def rows_of(batch: Batch) -> int:
    """Number of samples: the first dimension, which all tensors of the batch that have one share.

    Raises:
        UserError: They do not, or there is none.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in _tensors(batch)) or "no tensor"
        raise UserError(f"the tensors of a batch share their first dimension, the samples; got {shapes}")
    return sizes.pop()


def share(batch: Any, index: int, count: int) -> Any:
    """A copy of the `index`-th of `count` equal parts of a batch: neighbouring samples.

    What has no samples is in every part. A model may write to what it is given, and the batch is read again.
    """
    if isinstance(batch, Tensor):
        size = batch.shape[0] // count if batch.dim() else 0
        return batch[index * size : (index + 1) * size].clone() if batch.dim() else batch.clone()
    if isinstance(batch, dict):
        return {name: share(value, index, count) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(share(value, index, count) for value in batch)
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    values = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, tuple) else []
    return [tensor for value in values for tensor in _tensors(value)]


def find_loss(spec: ModelSpec) -> Loss | None:
    """The user's loss function, if there is one."""
    return find(spec.loss, "--loss") if spec.loss else None


def compute_loss(model: nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    """Forward pass and loss.

    A tuple becomes positional arguments and a dict keyword arguments. With a loss function the model gets as many of
    a tuple as its forward requires and what it names of a dict: the others, labels say, are for the loss function.

    Raises:
        UserError: The model does not take the batch, or what should be a loss is no scalar with a graph.
    """
    arguments, names = _arguments(model, batch, all_of_it=loss is None)
    if not _takes(model.forward, *arguments, **names):
        given = ", ".join(names) if names else f"{len(arguments)} positional arguments"
        hint = "" if loss is not None else ". If a part of it is for the loss, give --loss module:function"
        raise UserError(
            f"{type(model).__name__}.forward({', '.join(inspect.signature(model.forward).parameters)}) does not take a "
            f"batch of {given}{hint}"
        )
    output = model(*arguments, **names)
    value: Any
    if loss is not None:
        value, what = loss(output, batch), "--loss returned"
    elif isinstance(output, Mapping) and "loss" in output:
        value, what = output["loss"], 'the model\'s ["loss"] is'
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        value, what = output.loss, "the model's .loss is"
    else:
        value, what = output, "the model returned"
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.numel() == 1:
            got = "a tensor without a graph"
        hint = "" if loss is not None else "; give --loss module:function, where function(output, batch) returns one"
        raise UserError(f"the loss must be a scalar tensor to call backward on, but {what} {got}{hint}")
    return value.reshape(())


def _arguments(model: nn.Module, batch: Batch, all_of_it: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, dict):
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        chosen = {name: value for name, value in batch.items() if all_of_it or takes_any or name in parameters}
        return (), chosen
    arguments = batch if isinstance(batch, tuple) else (batch,)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(
        parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters.values()
    )
    return arguments if all_of_it else arguments[: max(1, required)], {}


def _takes(function: Callable[..., Any], *arguments: Any, **names: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **names)
    except (TypeError, ValueError):
        return False
    return True
