"""Plans over torch.distributed's sends and receives: Gloo, any hosts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.plan import PLANS, Round, Traffic
from paceline.comm.transport import CHUNK, CommunicationError, Transport, accumulation_dtype, sum_in_order


class PointToPointTransport:
    """Executes plans over a process group's point-to-point operations.

    Gloo's own reduce-scatter is an all-reduce on a copy, and its sums depend on where a buffer is cut; the
    plans move fewer bytes and add in rank order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Uses `group`, which spans every rank and serves this transport alone."""
        self.name = "gloo"
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._received: dict[torch.dtype, Tensor] = {}
        self._scratch: dict[torch.dtype, Tensor] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed flat buffer in this process's memory."""
        return torch.zeros(numel, dtype=dtype)

    def run(
        self, collective: str, buffer: Tensor, label: str, scale: float = 1.0, shard: Tensor | None = None
    ) -> Traffic:
        """Runs one collective in place; see `Transport.run`."""
        sent = received = 0
        if collective == "all_gather" and shard is not None:
            # As large as the buffer's own range, which is what the plan sends.
            buffer[self._rank * shard.numel() : (self._rank + 1) * shard.numel()].copy_(shard)
        try:
            for turn in PLANS[collective](self._rank, self._world_size, buffer.numel()):
                sent += sum(part.stop - part.start for part in turn.sends)
                received += sum(part.stop - part.start for part in turn.receives)
                self._exchange(turn, buffer, scale, shard)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank}: {collective} of {label} ({buffer.numel()} x {buffer.dtype}) failed over Gloo: "
                f"{error}"
            ) from error
        return Traffic(sent * buffer.itemsize, received * buffer.itemsize)

    def inherit(self, other: Transport) -> None:
        """See `Transport.inherit`: buffers belong to this process alone."""

    def interrupt(self) -> None:
        """Not possible: a wait for a peer ends with the group's time limit."""

    def close(self) -> None:
        """Ends the process group's threads and connections."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _exchange(self, turn: Round, buffer: Tensor, scale: float, shard: Tensor | None) -> None:
        receives = [part for part in turn.receives if part.stop > part.start]
        arrived: dict[int, Tensor] = {}
        if turn.combine == "add":
            needed = sum(part.stop - part.start for part in receives)
            room = self._received.get(buffer.dtype)
            if room is None or room.numel() < needed:
                room = self._received[buffer.dtype] = torch.empty(needed, dtype=buffer.dtype)
            offset = 0
            for part in receives:
                size = part.stop - part.start
                arrived[part.peer] = room[offset : offset + size]
                offset += size
        else:
            arrived = {part.peer: buffer[part.start : part.stop] for part in receives}
        works = [dist.irecv(tensor, group=self._group, group_src=peer) for peer, tensor in arrived.items()]
        works += [
            dist.isend(buffer[part.start : part.stop], group=self._group, group_dst=part.peer)
            for part in turn.sends
            if part.stop > part.start
        ]
        for work in works:
            if work is not None:
                work.wait()
        if turn.combine == "add" and receives:
            _, start, stop = receives[0]
            arrived[self._rank] = own = buffer[start:stop]
            parts = [arrived[rank] for rank in sorted(arrived)]
            out = own if shard is None else shard
            sum_in_order(out, parts, self._scratch_for(buffer.dtype), scale if turn.complete else 1.0)

    def _scratch_for(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=accumulation_dtype(dtype))
        return self._scratch[dtype]
