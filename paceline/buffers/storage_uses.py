"""Who else refers to the memory of a tensor: counts of the uses of its storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def storage_of(tensor: Tensor) -> int:
    """Returns a number that tells a tensor's storage from others."""
    return int(tensor.untyped_storage()._cdata)


def uses_of(tensor: Tensor) -> int:
    """Returns the number of references to a tensor's storage, of tensors and others."""
    return int(torch._C._storage_Use_Count(storage_of(tensor)))


_UNCOUNTED = uses_of(torch.empty(1, device="cpu")) - 1
"""Uses of a storage beside those by tensors. Asked once, as a tensor that is made in `torch.func` tells no storage."""


def used_elsewhere(tensors: Mapping[K, Tensor], times: int = 1, known: Iterable[Tensor] = ()) -> dict[K, Tensor]:
    """Returns the tensors whose memory others refer to, too, or other processes may.

    Args:
        tensors: By any key.
        times: How often each is there for a reason that is known: itself, and aliases of it.
        known: Other tensors that may lie in the same memory, and whose reason is known.
    """
    own = Counter({storage: times * count for storage, count in Counter(map(storage_of, tensors.values())).items()})
    own.update(map(storage_of, known))
    return {
        key: each
        for key, each in tensors.items()
        if uses_of(each) > own[storage_of(each)] + _UNCOUNTED or _is_shared_out(each)
    }


def _is_shared_out(tensor: Tensor) -> bool:
    """Whether a tensor is in memory for several processes, as `share_memory_` makes; mapped files are none."""
    return tensor.is_cpu and tensor.is_shared() and tensor.untyped_storage().filename is None
