"""A model's parameters, buffers and inputs as tensors that have shapes alone, in the precision that it computes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.core.errors import UserError


@contextmanager
def without_memory(
    model: nn.Module, units: Mapping[str, nn.Module], dtype: torch.dtype | None
) -> Iterator[list[Tensor]]:
    """Lets a model compute with stand-ins for its parameters and buffers, inside a `FakeTensorMode`.

    As in a run, parameters are cast to low precision, but for BatchNorm's; buffers are not, and what they meet is cast
    again where it enters a part with parameters.

    Args:
        model: Has its own back afterwards.
        units: Its units.
        dtype: What it computes in; None: in what its parameters are in.

    Yields:
        The stand-ins, those of shared parameters once.

    Raises:
        UserError: A part is TorchScript.
    """
    made: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise UserError(
                    f"{type(model).__name__} has TorchScript in it, which is no Python to trace: plan the module that "
                    "it was made of"
                )
            uncast = isinstance(module, nn.modules.batchnorm._BatchNorm)
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in tables:
                own = dict(held)
                stack.callback(held.update, own)
                for name, tensor in own.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        cast_to = dtype if held is module._parameters and not uncast else None
                        made[id(tensor)] = _stand_in(tensor, cast_to)
                    held[name] = made[id(tensor)]
        if dtype is not None:
            for unit in units.values():
                if any(buffer.dtype == torch.float32 for buffer in unit.buffers()):
                    for part in unit.modules():
                        statistics = isinstance(part, nn.modules.batchnorm._NormBase)
                        if not statistics and any(True for _ in part.parameters(recurse=False)):
                            handle = part.register_forward_pre_hook(_casting(dtype), with_kwargs=True)
                            stack.callback(handle.remove)
        yield list(made.values())


def fake(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor without memory like `value`, cast if it is fp32 and `dtype` is given; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return cast(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu"), dtype)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """An fp32 tensor in `dtype`, if one is given; anything else as it is."""
    if dtype is not None and isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.to(dtype)
    return value


def _stand_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _casting(dtype: torch.dtype) -> Any:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda each: cast(each, dtype), (args, kwargs))

    return before
