"""Memory in place of the meta device, which can tell whether it was written to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.core.errors import UserError
from paceline.core.layout import ALIGNMENT

_UNWRITTEN = 255
"""Every byte of fresh memory: NaN in the floating dtypes."""


def fresh_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Fresh memory of a tensor's shape, strides and dtype, without gaps."""
    return Scratch(_room(tensor), device).like(tensor)


class Scratch:
    """Fresh memory for several tensors, given again and again.

    Allocating and freeing each tensor instead leaves gaps that the C library does not fill: a process was seen to grow
    by all that it had ever allocated.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocates `size` bytes."""
        self._memory, self._used = torch.empty(size, dtype=torch.uint8, device=device), 0

    @staticmethod
    def size(tensors: Iterable[Tensor]) -> int:
        """Bytes that tensors take together."""
        return sum(map(_room, tensors))

    def like(self, tensor: Tensor) -> Tensor:
        """Memory of a tensor's shape, strides and dtype, without gaps; no other's until `clear`."""
        memory = self._memory[self._used : self._used + tensor.numel() * tensor.itemsize].fill_(_UNWRITTEN)
        self._used += _room(tensor)
        strides = torch.empty_like(tensor, device="meta").stride()
        # With a version of its own, and not that of all others.
        return memory.view(tensor.dtype).as_strided(tensor.shape, strides).data

    def clear(self) -> None:
        """What was given is no longer used."""
        self._used = 0


def leave_meta(name: str, parameter: nn.Parameter, memory: Tensor) -> None:
    """Gives a parameter memory; it stays the same object, so that what is tied stays tied.

    Raises:
        UserError: It was used, or is referred to, in a way that would be lost.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise UserError(f"parallelize: {name} has hooks on the meta device; register them after pl.parallelize")
    real = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    real.__class__ = type(parameter)
    attributes = dict(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, real)
    except RuntimeError as error:
        raise UserError(
            f"parallelize: {name} cannot leave the meta device ({error}): compute with parameters, and refer to them "
            "weakly, only after pl.parallelize"
        ) from error
    parameter.__dict__.update(attributes)


def lacks_values(tensor: Tensor, version: int) -> bool:
    """Whether a part of fresh memory was not written to, or with NaN. Of integers and the like: whether all was not.

    Args:
        tensor: Lies in fresh memory.
        version: Its version when it got that.
    """
    if not tensor.numel():
        return False
    if tensor.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        real = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
        # It needs no memory, as comparing each element would.
        return bool(real.amax().isnan())
    flat = tensor.data.as_strided((tensor.numel(),), (1,))
    return tensor._version == version and int(flat.view(torch.uint8).min()) == _UNWRITTEN


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT
