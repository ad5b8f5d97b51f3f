"""Which modules are units: the pieces whose parameters are gathered, reduced and timed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from paceline.core.errors import UserError
from paceline.core.layout import ROOT, ParameterSpec

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called themselves."""


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """A model's parameters, as `nn.Module` lists them.

    Many modules define `parameters` or `named_parameters` anew to give an optimizer some alone. What they leave out is
    trained all the same where another optimizer has it.
    """
    return nn.Module.named_parameters(model, remove_duplicate=remove_duplicate)


def find_units(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Cuts a model into units that do not nest.

    Blocks come first: the modules that `patterns` name or, without patterns, the children of every outermost
    container that repeats one class (a Transformer's layers, a ResNet's stages). What is left is cut into the
    largest called modules that contain no block: embeddings, final norm, head.

    Args:
        model: Any module.
        patterns: Names or shell patterns of modules, as in `named_modules`.

    Returns:
        Modules by name, in registration order. Parameters of no module in it belong to unit `ROOT`.

    Raises:
        UserError: A pattern matches nothing, or one unit would contain another.
    """
    blocks = find_blocks(model, patterns)
    units: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        inside = any(block != name and (not name or block.startswith(name + ".")) for block in blocks)
        callable_whole = not isinstance(module, _HOLDERS)
        if name and not inside and callable_whole:
            if any(True for _ in named_parameters(module)):
                units[name] = module
            return
        for child, submodule in module.named_children():
            visit(f"{name}.{child}" if name else child, submodule)

    visit("", model)
    return units


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> list[str]:
    """The repeated units, such as a Transformer's layers, or those that `patterns` name; see `find_units`."""
    return _named_blocks(model, patterns) if patterns else _repeated_blocks(model)


def parameter_specs(model: nn.Module, units: Sequence[str], left: Container[nn.Parameter] = ()) -> list[ParameterSpec]:
    """Every parameter of a model once, with the unit it belongs to; but for those that are left to another model.

    A parameter that several units use (tied) belongs to none of them, but to `ROOT`. Those of BatchNorm in fp32 stay so
    beside their fp32 statistics, as under `torch.autocast`: on CPUs torch computes with no other.
    """
    uncast = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module._parameters.values()
        if parameter is not None and parameter.dtype == torch.float32
    }
    owners: dict[int, set[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        owner = next((unit for unit in units if name.startswith(unit + ".")), ROOT)
        owners.setdefault(id(parameter), set()).add(owner)
    return [
        ParameterSpec(
            name=name,
            shape=tuple(parameter.shape),
            stride=_dense_stride(parameter),
            dtype=str(parameter.dtype).removeprefix("torch."),
            itemsize=parameter.itemsize,
            unit=next(iter(owners[id(parameter)])) if len(owners[id(parameter)]) == 1 else ROOT,
            trainable=parameter.requires_grad,
            casts=id(parameter) not in uncast,
        )
        for name, parameter in named_parameters(model)
        if parameter not in left
    ]


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides where they cover memory without gaps, else those of a contiguous tensor."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return tuple(parameter.stride())
    return tuple(torch.empty(parameter.shape, device="meta").stride())


def _named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    blocks: list[str] = []
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise UserError(f"strategy.units: {pattern!r} matches no module; names look like {', '.join(names[:5])}")
        for name in (called for match in matches for called in _called(match, model.get_submodule(match))):
            if name not in blocks:
                blocks.append(name)
    for outer in blocks:
        for inner in blocks:
            if inner.startswith(outer + "."):
                raise UserError(
                    f"strategy.units: units must not nest, but {outer} contains {inner}; a * in a pattern stands for "
                    "dots too, so name the list that holds the blocks"
                )
    return blocks


def _called(name: str, module: nn.Module) -> list[str]:
    """The module, or where it is a list or dictionary, which is never called, those in it."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [name]
    return [called for child, held in module.named_children() for called in _called(f"{name}.{child}", held)]


def _repeated_blocks(model: nn.Module) -> list[str]:
    blocks: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        children = [
            (f"{name}.{child}" if name else child, submodule)
            for child, submodule in module.named_children()
            if any(True for _ in named_parameters(submodule))
        ]
        classes = Counter(type(submodule) for _, submodule in children)
        if isinstance(module, _CONTAINERS) and classes and classes.most_common(1)[0][1] >= 2:
            blocks.extend(child for child, _ in children)
            return
        for child, submodule in children:
            visit(child, submodule)

    visit("", model)
    return blocks
