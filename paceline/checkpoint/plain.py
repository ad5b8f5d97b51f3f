"""Python values as JSON and back, with their tensors set aside: nothing that is read back can execute."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.manifest import ITEM_BYTES
from paceline.core.errors import UserError

_TAG = "$"
"""How the one key of an object begins that stands for something that JSON has not."""


def encode(value: Any, put: Callable[[Tensor], str], where: str) -> Any:
    """What JSON can say for a value.

    Args:
        value: None, booleans, numbers, text, bytes, lists, tuples, dictionaries, `Counter`, tensors and NumPy arrays,
            nested.
        put: Takes a tensor aside and returns a name for it.
        where: What the value is, for messages, such as "extra".

    Raises:
        UserError: There is something else in it, such as itself or a tensor without elements of its own; says where.
    """
    try:
        return _encoded(value, put, where)
    except RecursionError:
        raise UserError(f"{where} holds itself, or is nested too deeply: give less of it") from None


def _encoded(value: Any, put: Callable[[Tensor], str], where: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case np.generic() if not isinstance(plain := value.item(), np.generic):
            return _encoded(plain, put, where)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case bytes():
            return {"$bytes": base64.b85encode(value).decode()}
        case Tensor() if (why := lack(value)) is not None:
            raise UserError(f"{where} is a tensor {why}, which a checkpoint cannot hold: give a dense one with values")
        case Tensor() if not value.dim() and not value.is_complex():
            return {"$scalar": [str(value.dtype).removeprefix("torch."), _encoded(value.item(), put, where)]}
        case Tensor():
            return {"$tensor": [put(value.detach()), list(value.shape)]}
        # Of a class of its own, such as a masked one, an array is more than its elements.
        case np.ndarray() if type(value) is np.ndarray and value.dtype.name in ITEM_BYTES:
            native = value.astype(value.dtype.newbyteorder("="))
            return {"$array": [put(torch.from_numpy(native)), list(value.shape)]}
        case list():
            return [_encoded(item, put, f"{where}[{index}]") for index, item in enumerate(value)]
        case tuple():
            return {"$tuple": [_encoded(item, put, f"{where}[{index}]") for index, item in enumerate(value)]}
        case Mapping():
            items = [(key, _encoded(item, put, f"{where}[{key!r}]")) for key, item in value.items()]
            if not isinstance(value, Counter) and all(isinstance(key, str) and key[:1] != _TAG for key, _ in items):
                return dict(items)
            keys = [_encoded(key, put, f"a key of {where}") for key, _ in items]
            tag = "$counter" if isinstance(value, Counter) else "$dict"
            return {tag: [[key, item] for key, (_, item) in zip(keys, items, strict=True)]}
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without code that would run when it is "
        "loaded: give numbers, text, lists, dictionaries and tensors, such as what its state_dict() returns"
    )


def lack(tensor: Tensor) -> str | None:
    """Why a tensor's elements cannot be written one after another; None where they can."""
    if tensor.is_meta:
        return "on the device meta"
    if tensor.is_nested:
        return "of tensors"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return None if str(tensor.dtype).removeprefix("torch.") in ITEM_BYTES else f"of {tensor.dtype}"


def decode(value: Any, get: Callable[[str], Tensor]) -> Any:
    """What `encode` was given.

    Args:
        value: What it returned.
        get: Returns the tensor that was set aside under a name, one-dimensional.

    Raises:
        ValueError: No value is said like that.
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith(_TAG):
        return {key: decode(item, get) for key, item in value.items()}
    ((tag, held),) = value.items()
    match tag, held:
        case "$float", "nan" | "inf" | "-inf":
            return float(held)
        case "$bytes", str():
            return base64.b85decode(held)
        case "$scalar", [str(dtype), number] if isinstance(getattr(torch, dtype, None), torch.dtype):
            return torch.tensor(decode(number, get), dtype=getattr(torch, dtype), device="cpu")
        case "$tensor", [str(name), list(shape)]:
            return get(name).reshape(shape)
        case "$array", [str(name), list(shape)]:
            return get(name).reshape(shape).numpy()
        case "$tuple", list():
            return tuple(decode(item, get) for item in held)
        case "$dict", list():
            return {decode(key, get): decode(item, get) for key, item in held}
        case "$counter", list():
            return Counter({decode(key, get): decode(item, get) for key, item in held})
    raise ValueError(f"{tag} is no kind of value")


def holds_tensors(encoded: Any) -> bool:
    """Whether there are tensors with dimensions in what `encode` returned."""
    if isinstance(encoded, list):
        return any(map(holds_tensors, encoded))
    return isinstance(encoded, dict) and ("$tensor" in encoded or any(map(holds_tensors, encoded.values())))
