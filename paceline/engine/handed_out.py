"""What a training loop keeps of gradients once it has dropped `p.grad`: it stays as it was."""

from __future__ import annotations

import torch
from torch import Tensor

Memory = dict[str, tuple[Tensor, Tensor, int]]


class HandedOut:
    """Views of buffers that are written again and again, given to a loop that may keep them.

    Plain PyTorch makes new gradients in each step, so a loop that keeps `p.grad` over `zero_grad()` keeps its values.
    Here they lie in buffers that are reused. On CPUs the views that a loop gets share a storage of their own over a
    buffer's memory. If any of them is left when the buffer is about to be written, that storage moves elsewhere with
    its values, and every view of it follows. GPU memory cannot be moved so: there a loop clones what it keeps.
    """

    def __init__(self) -> None:
        """Has given nothing out."""
        self._memory: Memory = {}

    def view(self, name: str, buffer: Tensor, part: Tensor) -> Tensor:
        """What a loop is given of a buffer.

        Args:
            name: Of the buffer.
            buffer: Contiguous and one-dimensional.
            part: A view of it.
        """
        if buffer.device.type != "cpu" or not buffer.numel():
            return part.view_as(part)
        found = self._memory.get(name)
        if found is None or found[0].data_ptr() != buffer.data_ptr() or found[0].numel() != buffer.numel():
            # By way of numpy, whose array keeps the buffer alive, torch makes another storage over the same memory.
            shown = torch.from_numpy(buffer.detach().view(torch.uint8).numpy()).view(buffer.dtype)
            found = self._memory[name] = (shown, buffer, _uses(shown))
        offset = int(part.storage_offset()) - int(buffer.storage_offset())
        return found[0].as_strided(part.shape, part.stride(), offset)

    def uses(self, name: str) -> int:
        """How many tensors were made of a buffer's views, here and by a loop, and are left; 0 where that is unknown."""
        found = self._memory.get(name)
        return _uses(found[0]) - found[2] if found is not None else 0

    def release(self, name: str) -> None:
        """A buffer is about to be written: what a loop still has of it moves elsewhere."""
        found = self._memory.get(name)
        if found is not None and _uses(found[0]) > found[2]:
            found[0].untyped_storage().share_memory_()
            del self._memory[name]


def _uses(tensor: Tensor) -> int:
    """How many tensors and others refer to the storage of one."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
