"""The buffers of a schedule as memory: allocated from its table, handed out by span."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from paceline.comm.transport import Transport
from paceline.core.buffers import Buffer, BufferKind
from paceline.core.layout import Slot
from paceline.core.ops import Span


class Tensors:
    """One flat tensor per buffer of a table.

    Attributes:
        by_name: Each buffer's memory.
    """

    def __init__(self, transports: Callable[[], Mapping[str, Transport]], device: torch.device) -> None:
        """Holds nothing yet.

        Args:
            transports: Gives what allocates memory that peers reach, by the name of its stream: `reset` opens new ones.
            device: Where the buffers live.
        """
        self.by_name: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        self._views: dict[tuple[Span, torch.dtype | None], Tensor] = {}
        self._transports, self._device = transports, device

    def allocate(self, buffers: Iterable[Buffer], *kinds: BufferKind) -> None:
        """Allocates the buffers of some kinds, zeroed, instead of those of these kinds that there are.

        A collective call where ranks communicate.
        """
        self._views.clear()
        for name in [name for name, kind in self._kinds.items() if kind in kinds]:
            del self.by_name[name], self._kinds[name]
        for buffer in buffers:
            if buffer.kind in kinds:
                self.by_name[buffer.name], self._kinds[buffer.name] = self._allocate(buffer), buffer.kind

    def _allocate(self, buffer: Buffer) -> Tensor:
        dtype = getattr(torch, buffer.dtype)
        transport = self._transports().get(buffer.stream) if buffer.stream is not None else None
        if transport is None:
            return torch.zeros(buffer.numel, dtype=dtype, device=self._device)
        return (transport.allocate_shared if buffer.shared else transport.allocate)(buffer.numel, dtype)

    def __getitem__(self, span: Span) -> Tensor:
        """The elements that a span names, flat."""
        return self.typed(span, None)

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The buffers, and all that was handed out of them and is kept here."""
        return (*self.by_name.values(), *list(self._views.values()))

    def typed(self, span: Span, dtype: torch.dtype | None) -> Tensor:
        """The elements that a span names, which counts bytes where its buffer holds several dtypes in turn."""
        view = self._views.get((span, dtype))
        if view is None:
            view = self.by_name[span.buffer][span.start : span.stop]
            if dtype not in (None, view.dtype):
                view = view.view(dtype)
            if not torch.is_inference_mode_enabled():
                # The same few are asked for in every step.
                self._views[span, dtype] = view
        return view


def parameter_in(flat: Tensor, slot: Slot, start: int) -> Tensor:
    """One parameter, in its shape and strides, inside a flat tensor that holds a range of its flat buffer.

    Args:
        flat: One-dimensional.
        slot: The parameter's place.
        start: First element of the flat buffer that `flat` holds.
    """
    offset = int(flat.storage_offset()) + slot.offset - start
    return flat.as_strided(slot.spec.shape, slot.spec.stride, offset)


def apart(tensor: Tensor) -> Tensor:
    """The elements of a tensor that lie apart in memory, to be written: of those that `expand` repeats, one."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, (bytes,), to be compared: NaN is not equal to itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().reshape(-1).view(torch.uint8)


def placeholder(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same shape, dtype and device that takes no memory, reads as NaN and cannot be written."""
    fill = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
