"""What several ranks add to the engine: transports, streams, and the collectives of the schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.plan import Traffic
from paceline.comm.streams import CommStream
from paceline.comm.transport import CommunicationError, Transport
from paceline.comm.world import World, open_stream, open_transport
from paceline.engine.counts import Counts
from paceline.engine.gradients import Gradients
from paceline.engine.weights import Weights
from paceline.ops import COUNTS, Op
from paceline.strategy import Strategy


class Synchronizer:
    """Performs the collectives that ops name.

    Attributes:
        streams: One per stream name that the schedule's collectives use.
        transports: By the same names; each joins the ranks that its collectives run over.
    """

    def __init__(self, strategy: Strategy, world: World) -> None:
        """Opens streams and transports. A collective call."""
        self._world = world
        # What a barrier passes round.
        self._token = torch.zeros(1, dtype=torch.float64, device=world.device)
        self._scale = 1 / world.world_size if strategy.gradients == "mean" else 1.0
        self._wire = strategy.wire
        ranks, shards = range(world.world_size), strategy.shards(world.world_size)
        everyone = [list(ranks)]
        self._groups = {"counts": everyone, "reduce": everyone}
        if shards > 1:
            self._groups["reduce"] = self._groups["gather"] = [
                list(ranks[first : first + shards]) for first in ranks[::shards]
            ]
        if 1 < shards < world.world_size:
            self._groups["replicate"] = [list(ranks[first::shards]) for first in range(shards)]
        self._open({})

    def reopen(self) -> None:
        """Gives up what is under way and opens new connections. Buffers stay. A collective call."""
        self.close()
        self._open(self.transports)

    def _open(self, before: dict[str, Transport]) -> None:
        self.transports = {
            name: open_transport(self._world, groups, wire=self._wire if name in ("reduce", "replicate") else "full")
            for name, groups in self._groups.items()
        }
        for name, transport in before.items():
            self.transports[name].inherit(transport)
        self.streams: dict[str, CommStream] = {name: open_stream(self._world, name) for name in self._groups}
        # Closes once: when asked to, or with the engine.
        self.close = weakref.finalize(self, _close, list(self.streams.values()), list(self.transports.values()))

    # ---- outside the schedule, with nothing under way

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Sends rank 0's tensors to every rank. A collective call."""
        for tensor in tensors:
            if tensor.numel():
                data = tensor.detach().reshape(-1)
                if data.stride() != (1,):
                    # A single element counts as contiguous whatever its stride, but not as bytes.
                    data = data.new_empty(data.shape).copy_(data)
                self.transports["counts"].run("broadcast/tree", data.view(torch.uint8), "model")
                tensor.detach().copy_(data.view(tensor.shape))

    def sum(self, value: Tensor, label: str) -> None:
        """Sums a one-dimensional tensor over all ranks, in place. A collective call."""
        self.transports["counts"].run("all_reduce", value, label)

    def barrier(self, label: str) -> Traffic:
        """Returns when all ranks that hold one copy between them have called it. A collective call."""
        return self.transports["gather"].run("barrier", self._token, label)

    def meet(self, label: str) -> None:
        """Sees that all ranks that hold one copy between them are about to do the same. A collective call.

        Raises:
            CommunicationError: One still waits for something else.
        """
        self.transports["gather"].run("all_reduce", self._token, label)

    def gather(self, buffer: Tensor, shard: Tensor, label: str) -> None:
        """Fills a buffer that is used once from all shards; `shard` is from the gather transport's `allocate`.

        A collective call.
        """
        self.transports["gather"].run("all_gather", buffer, label, shard=shard, once=True)

    # ---- the schedule's

    def work(self, op: Op, weights: Weights, gradients: Gradients | None, counts: Counts) -> Callable[[], Traffic]:
        """The function that performs one op of the schedule; what it raises names the parameters that it is about."""
        perform, contents = self._work(op, weights, gradients, counts), weights.contents.get(op.target)
        return partial(self._perform, perform, op.stream, contents)

    def _perform(self, perform: Callable[[], Traffic], stream: str, contents: str | None) -> Traffic:
        try:
            return perform()
        except CommunicationError as error:
            # Who waits for this rank in another stream would do so until the time limit.
            for name, transport in self.transports.items():
                if name != stream:
                    transport.interrupt()
            raise CommunicationError(f"{error}; {contents}" if contents else str(error)) from error

    def _work(self, op: Op, weights: Weights, gradients: Gradients | None, counts: Counts) -> Callable[[], Traffic]:
        transport = self.transports[op.stream]
        if op.target == COUNTS:
            return lambda: transport.run(op.kind, counts.buffer, op.target)
        if op.kind == "barrier":
            return lambda: self.barrier(op.target)
        bucket = weights.buckets[op.target]
        if op.kind == "broadcast":
            return lambda: transport.run(op.kind, weights.whole(bucket), op.target)
        if op.kind == "all_gather":
            whole, shard = weights.gathering(bucket)
            return lambda: transport.run(op.kind, whole, op.target, shard=shard)
        assert gradients is not None
        if op.stream == "replicate":
            reduced = gradients.reduced(bucket)
            return lambda: transport.run(op.kind, reduced, op.target)
        whole, shard, then = gradients.whole(bucket), gradients.shard(bucket), gradients.after_reduction(bucket)

        def reduce() -> Traffic:
            traffic = transport.run(op.kind, whole, op.target, self._scale, shard)
            then()
            return traffic

        return reduce

    def late_work(
        self, op: Op, weights: Weights, gradients: Gradients, late: Sequence[int], spare: Tensor
    ) -> Callable[[], Traffic]:
        """The function that reduces gradients which came after their bucket was, and adds them to it.

        Args:
            op: The first reduction of a bucket.
            weights: Hold the late gradients.
            gradients: Are added to.
            late: Parameters whose gradient came late on this rank.
            spare: As large as the bucket, from the reduce transport's `allocate`.
        """
        bucket = weights.buckets[op.target]
        spare.zero_()
        for index in set(late) & set(bucket.slots):
            slot, gradient = weights.layout.slots[index], weights.parameters[index].grad
            assert gradient is not None
            offset = spare.storage_offset() + slot.offset - bucket.start
            spare.as_strided(slot.spec.shape, slot.spec.stride, offset).copy_(gradient)

        def reduce_and_add() -> Traffic:
            traffic = self.transports[op.stream].run(op.kind, spare, op.target, self._scale)
            own = gradients.own(bucket, spare)
            if "replicate" in self.transports:
                self.transports["replicate"].run("all_reduce", own, op.target)
            gradients.reduced(bucket).add_(own)
            return traffic

        return reduce_and_add


def _close(streams: Sequence[CommStream], transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.interrupt()
    # What a stream that could not be ended still uses is left to the end of the process.
    ended = [stream.close() for stream in streams]
    if all(ended):
        for transport in transports:
            transport.close()
