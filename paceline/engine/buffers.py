"""The flat buffers of a layout, and the views that make parameters and gradients part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.comm.transport import Transport
from paceline.layout import Bucket, Layout, Slot


class Buffers:
    """Parameters and gradients of one rank in flat buffers.

    Attributes:
        buckets: By name.
        parameters: In the order of `layout.slots`. Their data are views into flat buffers; the parameter
            objects stay the user's own.
        gradients: The view of each trainable parameter's gradient, None for frozen ones and before
            `allocate_gradients`.
    """

    def __init__(
        self, layout: Layout, parameters: Sequence[nn.Parameter], device: torch.device, transport: Transport | None
    ) -> None:
        """Moves parameters into flat buffers.

        Args:
            layout: Where each parameter goes.
            parameters: In the order of `layout.slots`.
            device: Where the buffers live.
            transport: Allocates buffers of parameters where they are communicated every step.
        """
        self.layout = layout
        self.buckets = {bucket.name: bucket for bucket in layout.buckets}
        self.parameters = list(parameters)
        self.gradients: list[Tensor | None] = [None] * len(parameters)
        self._weights: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        for flat in layout.flats:
            dtype = getattr(torch, flat.dtype)
            if transport is None:
                self._weights.append(torch.zeros(flat.numel, dtype=dtype, device=device))
            else:
                self._weights.append(transport.allocate(flat.numel, dtype))
        with torch.no_grad():
            for slot, parameter in zip(layout.slots, self.parameters, strict=True):
                view = _view(self._weights[slot.flat], slot)
                view.copy_(parameter)
                parameter.data = view

    def allocate_gradients(self, transport: Transport) -> None:
        """Allocates the gradients' flat buffers where `transport` reaches them. A collective call."""
        for index, flat in enumerate(self.layout.flats):
            if flat.trainable:
                self._gradients[index] = transport.allocate(flat.numel, getattr(torch, flat.dtype))
        self.gradients = [
            _view(self._gradients[slot.flat], slot) if slot.spec.trainable else None for slot in self.layout.slots
        ]

    @property
    def weights(self) -> list[Tensor]:
        """The parameters' flat buffers, one per `layout.flats`."""
        return self._weights

    def bucket_of_weights(self, bucket: Bucket) -> Tensor:
        """The parameters of a bucket, flat."""
        return self._weights[bucket.flat][bucket.start : bucket.stop]

    def bucket_of_gradients(self, bucket: Bucket) -> Tensor:
        """The gradients of a bucket, flat."""
        return self._gradients[bucket.flat][bucket.start : bucket.stop]


def _view(flat: Tensor, slot: Slot) -> Tensor:
    return flat.as_strided(slot.spec.shape, slot.spec.stride, slot.offset)
