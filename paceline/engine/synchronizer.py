"""What several ranks add to the engine: transports, streams, and the collectives of the schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.plan import Traffic
from paceline.comm.streams import CommStream
from paceline.comm.transport import Transport
from paceline.comm.world import World, open_stream, open_transport
from paceline.engine.buffers import Buffers
from paceline.engine.counts import Counts
from paceline.layout import Bucket
from paceline.schedule import COUNTS, Op
from paceline.strategy import Strategy


class Synchronizer:
    """Performs the collectives that ops name.

    Attributes:
        streams: One per stream name that the schedule's collectives use.
        transport: Moves buckets.
        counts_transport: Moves the counts, beside the buckets.
    """

    def __init__(self, strategy: Strategy, world: World) -> None:
        """Opens streams and transports. A collective call."""
        self._scale = 1 / world.world_size if strategy.gradients == "mean" else 1.0
        self.transport = open_transport(world)
        self.counts_transport = open_transport(world)
        self.streams: dict[str, CommStream] = {name: open_stream(world, name) for name in ("reduce", "counts")}
        # Closes once: when asked to, or with the engine.
        self.close = weakref.finalize(
            self, _close, list(self.streams.values()), [self.transport, self.counts_transport]
        )

    def broadcast_state(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Sends rank 0's flat weights and module buffers to every rank. A collective call."""
        for flat in weights:
            if flat.numel():
                self.transport.run("tree_broadcast", flat.view(torch.uint8), "weights")
        for buffer in buffers:
            if buffer.numel():
                data = buffer.detach().contiguous().view(-1)
                self.transport.run("tree_broadcast", data.view(torch.uint8), "buffers")
                buffer.detach().copy_(data.view(buffer.shape))

    def work(self, op: Op, buffers: Buffers, counts: Counts) -> Callable[[], Traffic]:
        """The function that performs one op of the schedule."""
        if op.target == COUNTS:
            return self._call(self.counts_transport, op, counts.buffer, 1.0)
        bucket = buffers.buckets[op.target]
        if op.kind == "broadcast":
            return self._call(self.transport, op, buffers.bucket_of_weights(bucket), 1.0)
        return self._call(self.transport, op, buffers.bucket_of_gradients(bucket), self._scale)

    def late_work(self, op: Op, buffers: Buffers, bucket: Bucket, late: Sequence[int]) -> Callable[[], Traffic]:
        """The function that reduces gradients which came after their bucket was, and adds them to it."""
        reduced = buffers.bucket_of_gradients(bucket)
        spare = torch.zeros_like(reduced)
        for index in set(late) & set(bucket.slots):
            slot, gradient = buffers.layout.slots[index], buffers.parameters[index].grad
            assert gradient is not None
            spare.as_strided(slot.spec.shape, slot.spec.stride, slot.offset - bucket.start).copy_(gradient)
        run = self._call(self.transport, op, spare, self._scale)

        def reduce_and_add() -> Traffic:
            traffic = run()
            reduced.add_(spare)
            return traffic

        return reduce_and_add

    def _call(self, transport: Transport, op: Op, buffer: Tensor, scale: float) -> Callable[[], Traffic]:
        return lambda: transport.run(op.kind, buffer, op.target, scale)


def _close(streams: Sequence[CommStream], transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.interrupt()
    # What a stream that could not be ended still uses is left to the end of the process.
    ended = [stream.close() for stream in streams]
    if all(ended):
        for transport in transports:
            transport.close()
