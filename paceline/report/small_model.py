"""A model of three numbers on one rank: its buffers as the schedule lays them out, and what it computes with them.

The model is y = w1 x1 + w2 x2 + b with a squared error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.layout import ROOT, Bucket, ParameterSpec
from paceline.core.ops import Span
from paceline.core.schedule import Schedule

SPECS = (
    ParameterSpec("weight", (1, 2), (2, 1), "float64", 8, ROOT),
    ParameterSpec("bias", (1,), (1,), "float64", 8, ROOT),
)
NAMES = ("w1", "w2", "b")
_NAMED = {"weight": NAMES[:2], "bias": NAMES[2:]}
START = (0.773, 0.321, 0.067)
ITEMS = (((6.0, 2.0), 15.0), ((5.0, 2.0), 12.0))
"""Of each rank: x1 and x2, and what y should be."""
RATE = 1e-3
"""Of learning."""

Values = tuple[float | None, ...]
"""Of w1, w2 and b; None of what a rank does not hold."""
Content = list[float | None]
"""Of a part of a buffer."""


class SmallModel:
    """One rank."""

    def __init__(self, schedule: Schedule) -> None:
        """The rank holds its share of the parameters, and nothing else yet."""
        self.schedule, self.buffers = schedule, schedule.buffers(1)
        self.memory: dict[str, Content] = {each.name: [None] * each.numel for each in self.buffers}
        self.own_gradients: tuple[float, ...] = ()
        for bucket in schedule.layout.buckets:
            whole: Content = [0.0] * bucket.numel
            for name, place in self.places(bucket).items():
                whole[place] = START[NAMES.index(name)]
            if not schedule.shards_parameters:
                self.write(self.buffers.unsharded(bucket), whole)
            self.write(self.buffers.shard(bucket), self._share(whole))

    def read(self, span: Span) -> Content:
        """What lies there."""
        return self.memory[span.buffer][span.start : span.stop]

    def write(self, span: Span, values: Content) -> None:
        """Puts it there."""
        self.memory[span.buffer][span.start : span.stop] = values

    def forget(self, span: Span) -> None:
        """What lies there means nothing any more."""
        self.write(span, [None] * (span.stop - span.start))

    def places(self, bucket: Bucket) -> dict[str, int]:
        """Where in a bucket those of w1, w2 and b lie that are in it."""
        slots = [self.schedule.layout.slots[slot] for slot in bucket.slots]
        return {
            name: slot.offset - bucket.start + index
            for slot in slots
            for index, name in enumerate(_NAMED[slot.spec.name])
        }

    def compute(self) -> tuple[float, float]:
        """This rank's y and its loss; the gradients, which autograd has, are its own from now on."""
        import torch

        parameters = torch.tensor(self._by_name(self._whole), dtype=torch.float64, requires_grad=True)
        (x1, x2), target = ITEMS[self.schedule.rank]
        y = parameters @ torch.tensor([x1, x2, 1.0], dtype=torch.float64)
        loss = (y - target).square()
        (gradients,) = torch.autograd.grad(loss, parameters)
        self.own_gradients = tuple(gradients.tolist())
        return y.item(), loss.item()

    def held(self) -> dict[str, Values]:
        """What it holds, by name: parameters, gradients in their buckets, and reduced ones where these lie apart."""
        found = {
            "parameters": self._by_name(lambda bucket: self._whole(bucket) or self._own_shard(bucket)),
            "gradients": self._by_name(lambda bucket: self.read(self.buffers.gradient(bucket))),
        }
        if self.buffers.has_reduced:
            found["reduced gradients"] = self._by_name(lambda b: self._spread(b, self.buffers.reduced(b)))
        return found

    def _whole(self, bucket: Bucket) -> Content:
        """A bucket's parameters to compute with; empty if they are not there."""
        values = self.read(self.buffers.unsharded(bucket))
        return values if any(value is not None for value in values) else []

    def _own_shard(self, bucket: Bucket) -> Content:
        return self._spread(bucket, self.buffers.shard(bucket))

    def _share(self, whole: Content) -> Content:
        size, index = len(whole) // self.schedule.shards, self.schedule.shard_index
        return whole[index * size : (index + 1) * size]

    def _spread(self, bucket: Bucket, shard: Span) -> Content:
        """This rank's shard of a bucket, at its place in the whole."""
        values: Content = [None] * bucket.numel
        size = shard.stop - shard.start
        first = self.schedule.shard_index * size
        values[first : first + size] = self.read(shard)
        return values

    def _by_name(self, content: Callable[[Bucket], Content]) -> Any:
        found: dict[str, float | None] = {}
        for bucket in self.schedule.layout.buckets:
            values = content(bucket)
            found.update({name: values[place] for name, place in self.places(bucket).items()})
        return tuple(found[name] for name in NAMES)
