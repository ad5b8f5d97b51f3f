"""Memory that a loop shares with parameters for a while, in `pl.full_parameters` or by `p.data = t`, and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.buffers.handed_out import storage_of, uses_of
from paceline.buffers.weights_hash import weights_hash
from paceline.core.errors import EngineError


class Lent:
    """What is kept of it: parameters are gathered to the same memory again, and what is written there else is refused.

    In plain PyTorch such a tensor is the parameter's memory for good. Where parameters are sharded, or updated in
    another dtype, it is so inside of `pl.full_parameters` alone.
    """

    def __init__(self, contents: Mapping[str, str]) -> None:
        """Nothing is.

        Args:
            contents: What each bucket holds, in words, by its name.
        """
        self._contents = contents
        self._kept: dict[str, tuple[Tensor, int]] = {}

    def memory(self, bucket: str) -> Tensor | None:
        """Where a bucket is gathered to, if a loop still has tensors of that memory."""
        kept = self._kept.pop(bucket, None)
        return kept[0] if kept is not None and _is_kept(kept[0], 1) else None

    def keep(self, buckets: Mapping[str, Tensor], shown: Counter[int]) -> None:
        """The parameters are elsewhere again: keeps what a loop still has tensors of.

        Args:
            buckets: Memory that they were in, by what it is called.
            shown: How many tensors besides these the engine itself has there, by `storage_of`.
        """
        for name, memory in buckets.items():
            if _is_kept(memory, 1 + shown[storage_of(memory)]):
                self._kept[name] = memory, weights_hash([memory])

    def require_unedited(self) -> None:
        """Refuses to go on where somebody has written to it meanwhile, which reaches no parameter.

        Raises:
            EngineError: Somebody did.
        """
        for name, (memory, expected) in list(self._kept.items()):
            if not _is_kept(memory, 1):
                del self._kept[name]
            elif weights_hash([memory]) != expected:
                raise EngineError(
                    f"{self._contents.get(name, name)}: a tensor that was taken of it inside `with "
                    "pl.full_parameters(model):`, or given to it by p.data = ..., was written to outside of that, "
                    "where it is not the parameter's memory: write to p inside `with pl.full_parameters(model):`, and "
                    "keep p.detach().clone() of what is only read"
                )


def _is_kept(tensor: Tensor, own: int) -> bool:
    """Whether the storage of a tensor has more tensors than the engine's own."""
    return uses_of(tensor) > own + uses_of(torch.empty(1)) - 1
