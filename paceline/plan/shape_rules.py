"""Shape rules that torch lacks: of operators that compute more than their rules for tensors without memory know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an ATen operator returns for tensors without memory.

    Grouped products, as mixtures of experts have them, compute in any floating-point type, but their rule knows
    bfloat16 alone.
    """
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    dtype = args[0].dtype

    def narrow(each: Any) -> Any:
        return each.to(torch.bfloat16) if isinstance(each, Tensor) and each.dtype == dtype else each

    return func(*tree_map(narrow, tuple(args)), **tree_map(narrow, dict(kwargs))).to(dtype)
