"""Whether each parameter of a model has memory of its own, which laying it out anew would otherwise take apart."""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.buffers.storage_uses import storage_of, used_elsewhere
from paceline.core.errors import UserError
from paceline.models.units import named_parameters


def require_own_parameters(
    model: nn.Module, stay_on: torch.device | None, will_be_sharded: bool, others: Container[nn.Parameter] = ()
) -> None:
    """Refuses a model whose parameters would be others once each has been given its place in a flat buffer.

    Args:
        model: Not parallel yet.
        stay_on: Where they may stay as they are, if they are there and dense; None if they are to lie in buffers.
        will_be_sharded: Whether this rank is to have only shards of them.
        others: Other parallel models, which see to those of them that they have.

    Raises:
        UserError: Some have no shape yet, or share memory that they are to leave; or are to be sharded, and somebody
            has a tensor in their memory, or another process may.
    """
    for name, tensor in (*named_parameters(model), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"parallelize: {name} has no shape before the model has run: run the model once on one batch, then "
                "parallelize it"
            )
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in named_parameters(model):
        if parameter in others or not parameter.numel() or parameter.is_meta:
            continue
        by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    every = [parameter for each in by_storage.values() for _, parameter in each]
    stay = stay_on is not None and all(_stays(parameter, stay_on) for parameter in every)
    for together in by_storage.values():
        _require_apart(together, stay)
    _part_from_normalised(model)
    named = {name: parameter for each in by_storage.values() for name, parameter in each}
    if will_be_sharded:
        _part_versions(named)
    taken = used_elsewhere(named) if will_be_sharded else {}
    if taken:
        # Garbage that is not collected yet keeps nothing, such as the engine of which pl.release has freed the model.
        gc.collect()
        taken = used_elsewhere(named)
    if taken:
        raise UserError(
            f"parallelize: a tensor that was taken from {next(iter(taken))} before (p.data, p.detach(), state_dict()) "
            "is still kept, or other processes have its memory (model.share_memory()). With zero=3 this rank is to "
            "have only its shard of the parameter: there it would stay as it is now, and keep the whole in memory. "
            "Drop tensors or take a .clone() of them, parallelize a copy.deepcopy(model) of what is shared, and read "
            "parameters inside `with pl.full_parameters(model):`"
        )


def _part_versions(parameters: Mapping[str, Tensor]) -> None:
    """Gives parameters that count their versions together, as slices of one tensor do, a counter each.

    By versions it is told that one was edited, and that a graph is of other weights.

    Raises:
        UserError: One cannot be given another, as something refers to what it is now.
    """
    names = [name for name, parameter in parameters.items() if not parameter.is_inference()]
    counted = [parameters[name] for name in names]
    versions = tuple(parameter._version for parameter in counted)
    set_versions = torch._C._autograd._unsafe_set_version_counter
    set_versions(tuple(counted), tuple(range(len(counted))))
    together = [index for index, parameter in enumerate(counted) if parameter._version != index]
    set_versions(tuple(counted), versions)
    for index in together:
        parameter = counted[index]
        used = getattr(parameter, "_use_count", lambda: 1)() > 1
        if used or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"parallelize: {names[index]} was made of a part of a tensor, as others were, by nn.Parameter(t[k]), "
                "and has hooks or a graph already: with zero=3 edits of one would look like edits of all. Make it of "
                "a copy, nn.Parameter(t[k].clone()), or register hooks after pl.parallelize"
            )
        apart = nn.Parameter(parameter.data, parameter.requires_grad)
        apart.grad = parameter.grad
        torch._C._swap_tensor_impl(parameter, apart)


def _part_from_normalised(model: nn.Module) -> None:
    """Gives weights that spectral normalisation makes anew in each forward memory of their own.

    Until the first one they lie in that of the parameters that they are made of.
    """
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                weight, original = getattr(module, hook.name), getattr(module, f"{hook.name}_orig")
                if storage_of(weight) == storage_of(original):
                    setattr(module, hook.name, weight.clone())


def _stays(parameter: Tensor, device: torch.device) -> bool:
    """Whether a parameter can be computed with and updated where it is."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    return bool(is_dense) and parameter.device == device and not parameter.is_inference()


def _require_apart(parameters: list[tuple[str, Tensor]], stay: bool) -> None:
    """Refuses parameters of one storage that have bytes in common: within one, and unless they stay between them."""
    taken: list[tuple[int, int, str, Tensor]] = []
    for name, parameter in parameters:
        start, end = _span(parameter)
        if torch._debug_has_internal_overlap(parameter) and _marks(parameter, start, end).sum() < parameter.nbytes:
            raise UserError(
                f"parallelize: elements of {name} share memory with each other, as expand() leaves them, so they "
                "cannot be updated: give it memory of its own, nn.Parameter(tensor.clone())"
            )
        for other_start, other_end, other_name, other in () if stay else taken:
            if start >= other_end or other_start >= end:
                continue
            low, high = min(start, other_start), max(end, other_end)
            if (_marks(parameter, low, high) & _marks(other, low, high)).any():
                raise UserError(
                    f"parallelize: {name} and {other_name} are two parameters in the same memory, which would come "
                    "apart: tie them as one (model.b.weight = model.a.weight), give each memory of its own, or set "
                    "strategy.zero to 0 and strategy.precision to float32"
                )
        taken.append((start, end, name, parameter))


def _span(parameter: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a parameter lies on, and the first after it."""
    start = int(parameter.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return start * parameter.itemsize, (last + 1) * parameter.itemsize


def _marks(parameter: Tensor, start: int, end: int) -> Tensor:
    """Which bytes from `start` to `end` of its storage a parameter lies on: bool."""
    marks, size = torch.zeros(end - start, dtype=torch.bool), parameter.itemsize
    strides = (*(stride * size for stride in parameter.stride()), 1)
    marks.as_strided((*parameter.shape, size), strides, int(parameter.storage_offset()) * size - start).fill_(True)
    return marks
