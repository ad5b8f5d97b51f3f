"""The collectives that ops name: streams and transports of one model's ranks, and what they do to its buffers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.buffers.memory import apart
from paceline.comm.connect import Wanted, open_stream, open_transports
from paceline.comm.control import new_generation
from paceline.comm.streams import CommStream
from paceline.comm.transport import CommunicationError, Transport, explain
from paceline.comm.world import World, note_failure
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError
from paceline.core.ops import Op
from paceline.core.placement import Placement
from paceline.executor.advice import ADVICE, advised


class Collectives:
    """Carries out collectives between the ranks of one job, each stream's over its group of the mesh.

    Attributes:
        streams: One per stream name that the schedule's collectives use.
        transports: By the same names; each joins the ranks that its collectives run over.
        has_given_up: Whether nothing more can be communicated until `reopen`.
    """

    def __init__(self, placement: Placement, world: World) -> None:
        """Opens streams and transports. A collective call."""
        self._world = world
        # What a barrier passes round.
        self._token = torch.zeros(1, dtype=torch.float64, device=world.device)
        self._wire = placement.strategy.wire
        self._groups = {stream: placement.ranks_of(group) for stream, group in placement.groups.items()}
        self._open({})

    def require_reopens(self, call: str) -> None:
        """Refuses to go on after a failure where that cannot be done.

        On GPUs the hosts of other ranks are ahead: they have queued the update behind reductions that this rank never
        joined. To abort these would let it run, on whatever is there.

        Raises:
            EngineError: These ranks are on GPUs.
        """
        if self._world.backend == "nccl":
            raise EngineError(
                f"{call}: between GPUs a step that failed on a rank cannot be taken back, as other ranks have queued "
                "the update behind it already. Let every rank end, and start the job again from a checkpoint "
                "(torchrun --max-restarts does)"
            )

    def reopen(self, call: str) -> None:
        """Gives up what is under way and opens new connections. Buffers stay. A collective call.

        Args:
            call: What asks for it. Ranks that wait for this one are told so, or of the exception that is being handled.
        """
        error = sys.exc_info()[1]
        cause = explain(error) if error is not None else ""
        for transport in self.transports.values():
            transport.abort(cause or f"{call} there; every rank is to call it")
        self.close()
        new_generation(cause=cause)
        self._open(self.transports)

    def _open(self, before: Mapping[str, Transport]) -> None:
        wanted: dict[str, Wanted] = {
            name: Wanted(groups, self._wire if name in ("reduce", "replicate") else "full", rare=name == "statistics")
            for name, groups in self._groups.items()
        }
        self.transports: dict[str, Transport] = open_transports(self._world, wanted)
        for name, transport in before.items():
            self.transports[name].inherit(transport)
        self.has_given_up = False
        self.streams: dict[str, CommStream] = {name: open_stream(self._world, name) for name in self._groups}
        streams, transports = list(self.streams.values()), list(self.transports.values())
        self._finalizer: weakref.finalize[..., Collectives]
        if self._world.backend == "nccl":
            # An engine is collected when it happens to be, on each rank at another time, and no other rank waits then.
            self._finalizer = weakref.finalize(self, _abandon, streams)
            self._finalizer.atexit = False
        else:
            self._finalizer = weakref.finalize(self, _close, streams, transports)

    def close(self) -> None:
        """Ends streams and connections; safe to call twice. Between GPUs a collective call, but after a failure."""
        if self._finalizer.detach() is None:
            return
        if self._world.backend != "nccl" or not self.has_given_up:
            _close(list(self.streams.values()), list(self.transports.values()))

    def give_up(self, error: BaseException, besides: str = "") -> None:
        """Wakes every rank that waits for this one in some stream but one, as it is about to raise."""
        self.has_given_up = True
        if self._world.backend == "nccl":
            note_failure()
        for name, transport in self.transports.items():
            if name != besides:
                transport.abort(explain(error))

    def note_exception(self) -> None:
        """Between GPUs gives up where an exception is on its way, such as in a loop's `finally`: others do not follow.

        They are elsewhere, and nobody wakes who waits for them on a GPU.
        """
        error = sys.exc_info()[1]
        if error is not None and self._world.backend == "nccl":
            self.give_up(error)

    def saved_residuals(self) -> dict[str, list[tuple[Any, Tensor]]]:
        """See `Transport.saved_residuals`, by stream."""
        return {name: saved for name, transport in self.transports.items() if (saved := transport.saved_residuals())}

    def load_residuals(self, saved: Mapping[str, list[tuple[Any, Tensor]]]) -> None:
        """See `Transport.load_residuals`: what `saved_residuals` returned."""
        for name, transport in self.transports.items():
            transport.load_residuals(saved.get(name, []))

    # ---- outside the schedule, with nothing under way

    def broadcast(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Sends rank 0's tensors to every rank. A collective call."""
        sent = [tensor for tensor in map(apart, tensors) if tensor.numel()]
        for tensor in sent:
            data = tensor.detach().reshape(-1)
            if data.stride() != (1,):
                # A single element counts as contiguous with any stride, but not as bytes.
                data = data.new_empty(data.shape).copy_(data)
            # What they all pass through is freed after the last: a step needs none.
            once = tensor is sent[-1]
            self._meet("statistics", "broadcast/tree", data.view(torch.uint8), purpose, purpose, once=once)
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data.view(tensor.shape))

    def barrier(self, label: str) -> Traffic:
        """Returns when all ranks of this shard group have called it. A collective call."""
        return self.transports["gather"].run("barrier", self._token, label)

    def sum(self, value: Tensor, what: str, purpose: str) -> None:
        """Sums a one-dimensional tensor over all ranks, in place. A collective call."""
        self._meet("statistics", "all_reduce", value, f"{what} for {purpose}", purpose)

    def gather(self, purpose: str, buffer: Tensor, shard: Tensor, label: str) -> None:
        """Fills a buffer that is used once from all shards; `shard` is from the gather transport's `allocate`.

        A collective call.
        """
        self._meet("gather", "all_gather", buffer, f"{label} for {purpose}", purpose, shard=shard, once=True)

    def gather_parts(self, parts: Tensor, label: str, purpose: str) -> None:
        """Fills the rows of other ranks of this shard group. A collective call.

        Args:
            parts: (ranks of the group, elements), of any dtype; this rank's row is its own.
            label: What they are, the same on every rank.
            purpose: See `advised`.
        """
        self._meet("gather", "all_gather", parts.view(-1).view(torch.uint8), label, purpose)

    def _meet(
        self,
        stream: str,
        kind: str,
        buffer: Tensor,
        label: str,
        purpose: str,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> None:
        try:
            self.transports[stream].run(kind, buffer, label, shard=shard, once=once)
        except CommunicationError as error:
            raise advised(error, purpose) from error

    # ---- of the schedule

    def carry_out(
        self,
        op: Op,
        buffer: Tensor,
        contents: str | None,
        *,
        label: str = "",
        scale: float = 1.0,
        shard: Tensor | None = None,
        then: Callable[[], None] | None = None,
    ) -> Callable[[], Traffic]:
        """The function that performs one op; what it raises names the parameters that it is about.

        Args:
            op: A collective of the schedule.
            buffer: What it moves.
            contents: Which parameters the buffer holds, in words.
            label: What all ranks must agree that it is; by default the op's target.
            scale: Factor for a sum over ranks.
            shard: This rank's shard, where it does not lie in the buffer.
            then: Is called in the stream, after the collective.
        """
        return partial(self._perform, op, buffer, label or op.target, contents, scale, shard, then)

    def pass_barrier(self, op: Op) -> Callable[[], Traffic]:
        """The function that performs a barrier of the schedule."""
        return self.carry_out(op, self._token, None)

    def _perform(
        self,
        op: Op,
        buffer: Tensor,
        label: str,
        contents: str | None,
        scale: float,
        shard: Tensor | None,
        then: Callable[[], None] | None,
    ) -> Traffic:
        try:
            traffic = self.transports[op.stream].run(op.kind, buffer, label, scale, shard)
            if then is not None:
                then()
        except CommunicationError as error:
            # Who waits for this rank in another stream would do so until the time limit.
            self.give_up(error, besides=op.stream)
            raise advised(error, op.target if op.target in ADVICE else op.phase, contents) from error
        except BaseException as error:
            # After any error the others would wait for what does not come.
            self.give_up(error)
            raise
        return traffic


def _abandon(streams: Sequence[CommStream]) -> None:
    for stream in streams:
        stream.abandon()


def _close(streams: Sequence[CommStream], transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.abort()
    # What a stream that could not be ended still uses is left to the end of the process.
    ended = [stream.close() for stream in streams]
    if all(ended):
        for transport in transports:
            transport.close()
