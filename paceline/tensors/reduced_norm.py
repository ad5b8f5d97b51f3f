"""The 2-norm of a reduced gradient of which this rank has a shard: known since its backward, until it is edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReducedNorm:
    """What a backward has told of one gradient.

    No rank need be asked for the norm afterwards. A shard whose own norm is another one has been edited since. Edits
    that change no rank's own norm do not change the whole one; a rank that does not see one, as it has no element that
    was edited, is told by those that do.

    Attributes:
        own: The norm of this rank's shard, fp64, 0-dim.
        whole: That of the whole gradient, fp64, 0-dim.
    """

    own: Tensor
    whole: Tensor

    def of(self, shard: Tensor) -> Tensor | None:
        """Returns the whole gradient's norm in the dtype of its shard, 0-dim; None where that was edited.

        On a GPU its host waits.

        Args:
            shard: This rank's, of the gradient as it is now.
        """
        now = norms_of([shard], shard.device)[0]
        unedited = now == self.own or (now.isnan() and self.own.isnan())
        return self.whole.to(shard.dtype.to_real()) if unedited else None

    def scaled(self, shard: Tensor, factor: Tensor) -> ReducedNorm:
        """Returns what is known once the whole gradient has been multiplied.

        Args:
            shard: This rank's, multiplied.
            factor: By what: one element, positive.
        """
        return ReducedNorm(norms_of([shard], shard.device)[0], self.whole * factor.to(self.whole))


def norms_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """2-norms of tensors, summed in fp32 where they are of lower precision: (number of tensors,), fp64.

    Args:
        tensors: All on `device`; there may be none. Shards of gradients are taken for what they hold.
        device: Where the norms are.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    found: dict[int, Tensor] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            chosen = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
            wide = torch.promote_types(dtype, torch.float32)  # of complex numbers their absolute values
            norms = torch._foreach_norm([tensors[index] for index in chosen], 2, wide)
            found.update(zip(chosen, norms, strict=True))
        return torch.stack([found[index] for index in range(len(tensors))]).double()
