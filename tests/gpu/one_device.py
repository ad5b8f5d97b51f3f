"""Ranks that share one GPU: NCCL wants one for each, so what it would do goes over Gloo, by way of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from paceline.comm.nccl import NcclTransport
from paceline.core.collectives.rounds import Traffic
from tests.gpu.devices import ranks_on_gpus


class OverGloo(NcclTransport):
    """Copies to the host, behind what the stream has before, and back, before what it has next."""

    def _operation(self, scale: float, buffer: Tensor) -> Any:
        # Gloo neither takes means nor scales beforehand.
        buffer.mul_(scale)
        return dist.ReduceOp.SUM

    def run(
        self,
        collective: str,
        buffer: Tensor,
        label: str,
        scale: float = 1.0,
        shard: Tensor | None = None,
        once: bool = False,
    ) -> Traffic:
        """See `Transport.run`."""
        host, part = buffer.cpu(), None if shard is None else shard.cpu()
        traffic = super().run(collective, host, label, scale, part, once)
        buffer.copy_(host)
        if shard is not None and part is not None:
            shard.copy_(part)
        return traffic


@contextmanager
def one_device() -> Iterator[None]:
    """Inside, a rank joins others that have the same GPU."""
    joined, opened = dist.init_process_group, dist.new_group

    def join(backend: str, device_id: Any = None, **named: Any) -> None:
        joined("gloo", **named)

    def open_group(ranks: Sequence[int] | None = None, backend: str = "", **named: Any) -> Any:
        return opened(ranks, backend="gloo", **named)

    with (
        patch("paceline.comm.devices.index_of", lambda local_rank, gpus: 0),
        patch("paceline.comm.world.index_of", lambda local_rank, gpus: 0),
        patch("paceline.comm.devices._missing", lambda sights: ""),
        patch.object(dist, "init_process_group", join),
        patch.object(dist, "new_group", open_group),
        patch("paceline.comm.connect._group_of_all", lambda: opened(backend="gloo")),
        patch("paceline.comm.connect.NcclTransport", OverGloo),
    ):
        yield


def ranks_on_one_gpu(n: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function as `n` ranks on the first GPU; returns what each rank returned."""
    return ranks_on_gpus(n, function, *args, around=one_device)
