"""What one operator of PyTorch computes and moves, from the shapes it is called with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from paceline.plan.recurrent import STEPS
from paceline.plan.work import Operation

_ROWS_OF_TABLE = frozenset({"embedding", "index_select", "gather", "index", "take"})
"""They read as much of their first argument as they write."""

_INTO_TABLE = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_put_"})
"""They change as much of their first argument as they are given."""

_FREE = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "device", "detach"})
"""They compute nothing, and move nothing."""

_MULTIPLY = re.compile(r"(?<!cu)mm|conv|rnn|lstm|gru|attention|(?<!bi)(?<!tri)linear")
"""Of names of operators that multiply matrices, for those whose cost nobody told; not of cummax and bilinear sizes."""

_DECOMPOSE = re.compile(
    r"_?(linalg_(?!vector_norm|_powsum|check_errors|cross|vander|mat(?!rix_exp))|cholesky|svd|qr$|geqrf|orgqr|ormqr|lu_|"
    r"triangular_solve)"
)
"""Of names of operators that take many passes over a matrix, whose number depends on its values."""

BACKWARD_OF_ATTENTION = 2.5
"""Five products where the forward has two: scores are computed again (Dao et al. 2022, FlashAttention)."""


def operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Operation | None:
    """The work of one call of an ATen operator; None where it only looks at memory in another way.

    Args:
        func: The operator's overload, as a `TorchDispatchMode` gets it.
        args: Its arguments; of tensors shape, strides and dtype alone are looked at.
        kwargs: Its named arguments.
        result: What it returned.
    """
    name = func._schema.name.partition("::")[2]
    outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    if name in _FREE or not outputs or _is_view(func, args, kwargs, outputs):
        return None
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    moved = float(_moved(name, args, tensors, outputs))
    dtype = _dtype([*outputs, *tensors])
    known = _matmul(name, args, outputs) or _attention(name, args, kwargs)
    if known is not None:
        kind, flops, shape, count = known
        needed = _needed(name, args, kwargs) if kind == "attention" else 1.0
        aligned = kind != "matmul" or all(map(_is_aligned, (*tensors, *outputs)))
        return Operation(kind, flops, moved / count, dtype, shape, count, name, needed, aligned)
    if func.overloadpacket in flop_registry:
        flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        return Operation("matmul", flops, moved, dtype, name=name)
    return Operation("memory", 0.0, moved, dtype, name=name)


def uncounted(func: Any, counted: Operation | None) -> bool:
    """Whether an operator looks like one that multiplies or decomposes matrices, but its operations are not known."""
    name = func._schema.name.partition("::")[2]
    if counted is None or counted.kind != "memory":
        return False
    return _MULTIPLY.search(name) is not None or _DECOMPOSE.match(name) is not None


def _is_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    # `_unsafe_view` and `lift_fresh` return the memory they are given, though their schemas do not say so.
    given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    return all(each.untyped_storage()._cdata in given for each in outputs)


def _moved(name: str, args: Sequence[Any], tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes that are read and written at least."""
    written = _bytes(outputs)
    if name in _ROWS_OF_TABLE:
        return 2 * written + _bytes(tensors[1:])
    if name in _INTO_TABLE:
        # What is not in place copies the table first.
        return 3 * _bytes(tensors[1:]) + (0 if name.endswith("_") else 2 * written)
    if name == "embedding_dense_backward":
        return written + 3 * _bytes(tensors[:1])
    if name in ("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros"):
        return written
    if name in ("copy_", "_to_copy", "clone"):
        return written + _bytes(tensors[-1:])
    if name == "slice_backward" or name == "select_backward":
        return written + 2 * _bytes(tensors[:1])
    distinct = {(each.untyped_storage()._cdata, each.storage_offset(), tuple(each.shape)): each for each in tensors}
    return written + _bytes(distinct.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the elements that are there: an expanded tensor has each but once."""
    total = 0
    for tensor in tensors:
        repeated = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if not stride)
        total += tensor.numel() // max(repeated, 1) * tensor.itemsize
    return total


def _dtype(tensors: Sequence[Tensor]) -> str:
    floating = next((each for each in tensors if each.is_floating_point()), tensors[0])
    return str(floating.dtype).removeprefix("torch.")


_Known = tuple[Any, float, tuple[int, int, int, int], int]


def _matmul(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> _Known | None:
    if name in ("mm", "bmm", "_grouped_mm"):
        left, right = args[0], args[1]
    elif name.removesuffix("_") in ("addmm", "baddbmm", "addmv", "addbmm"):
        left, right = args[1], args[2]
    elif name in ("mv", "dot", "vdot"):
        left, right = args[0], args[1]
    elif name in ("convolution", "_convolution", "cudnn_convolution"):
        shape = _convolution(args[0], args[1], outputs[0], transposed=bool(args[6]), groups=args[8])
        return "matmul", 2.0 * math.prod(shape), shape, 1
    elif name == "convolution_backward":
        grad, given, weight, mask = args[0], args[1], args[2], args[-1]
        shape = _convolution(given, weight, grad, transposed=bool(args[7]), groups=args[9])
        # Gradients of input and weight are products of the same three sizes.
        return "matmul", 2.0 * math.prod(shape), shape, max(1, sum(mask[:2]))
    elif name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        given, weights = args[0], args[1:3]
        rows = given.numel() // given.shape[-1]
        columns = weights[0].shape[0]
        shape = (1, rows, sum(weight.shape[1] for weight in weights), columns)
        return "matmul", 2.0 * math.prod(shape), shape, 2 if name.endswith("backward") else 1
    elif name == "_trilinear":
        shape = _trilinear(args[:3], args[3:6], args[7] if len(args) > 7 else 1)
        return "matmul", 2.0 * math.prod(shape), shape, 1
    elif name.startswith(STEPS):
        # One step waits for the one before.
        steps, batch, *_ = args[0].shape
        shape = (1, batch, args[3].shape[1], args[3].shape[0])
        return "matmul", 2.0 * math.prod(shape), shape, steps
    else:
        return None
    # Of grouped products each row is in one group.
    batch = left.shape[0] if left.dim() == 3 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    rows = left.shape[-2] if left.dim() > 1 else 1
    shape = (batch, rows, left.shape[-1], columns)
    return "matmul", 2.0 * math.prod(shape), shape, 1


def _is_aligned(matrix: Tensor) -> bool:
    """Whether rows, or columns where these are what lies together, begin at multiples of 16 bytes."""
    if matrix.dim() not in (2, 3) or matrix.itemsize > 2 or 1 in matrix.shape[-2:]:
        return True
    return max(matrix.stride()[-2:]) * matrix.itemsize % 16 == 0


def _convolution(
    given: Tensor, weight: Tensor, result: Tensor, transposed: bool, groups: int
) -> tuple[int, int, int, int]:
    """As a product of matrices: every place of the kernel times every channel, for each group."""
    places = (given if transposed else result).shape[2:]
    rows = given.shape[0] * math.prod(places)
    inner, columns = weight.shape[1] * math.prod(weight.shape[2:]), weight.shape[0] // groups
    return groups, rows, inner, columns


def _trilinear(factors: Sequence[Tensor], missing: Sequence[Sequence[int]], unrolled: int) -> tuple[int, int, int, int]:
    """As nn.Bilinear's and its gradients' sums of products of three: a product of matrices for each output.

    Args:
        factors: Three tensors.
        missing: Of each, which of the four dimensions it has not.
        unrolled: The dimension that is gone through.
    """
    sizes = [1] * 4
    for factor, absent in zip(factors, missing, strict=True):
        own = iter(factor.shape)
        sizes = [max(size, 1 if index in absent else next(own)) for index, size in enumerate(sizes)]
    batch = sizes.pop(unrolled)
    return batch, sizes[0], sizes[1], sizes[2]


def _attention(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Known | None:
    if not name.startswith("_scaled_dot_product_") or "math" in name:
        return None
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    products = 2.0 * batch * heads * queries * keys * (width + value.shape[3])
    if causal(name, args, kwargs):
        # Of queries that see no more than themselves and what is before them, half.
        products /= 2
    flops = products * BACKWARD_OF_ATTENTION if backward else products
    return "attention", flops, (batch * heads, queries, keys, width), 1


def _needed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """As `Operation.needed`: backward needs twice what forward does."""
    again = 2 / BACKWARD_OF_ATTENTION if name.endswith("_backward") else 1.0
    return 2 * again if causal(name, args, kwargs) else again


def causal(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a fused attention's operator skips what lies ahead."""
    overload = getattr(torch.ops.aten, name).default
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(given.get("is_causal", False))
