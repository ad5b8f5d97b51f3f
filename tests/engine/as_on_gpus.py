"""The way that the engine goes on GPUs, gone on CPUs: NCCL's transport over Gloo, and streams that are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from paceline.comm.nccl import NcclTransport
from paceline.comm.streams import Pending, ThreadStream
from paceline.comm.world import World
from paceline.core.collectives.rounds import Traffic


class Calls:
    """What streams and process groups were asked for.

    Attributes:
        submitted: Labels of collectives, over all streams in the order in which they were launched.
        groups: Ranks of every group that was opened.
        waited: How often the host waited for a stream to end.
        abandon: How often a stream was given up without waiting.
        ended: How often a process group was ended with the other ranks.
    """

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.groups: list[list[int]] = []
        self.waited = self.abandon = self.ended = 0


@contextmanager
def as_on_gpus() -> Iterator[Calls]:
    """Inside, models that are made parallel think that they are between GPUs."""
    calls, new_group = Calls(), dist.new_group

    def gloo(ranks: Sequence[int], *, backend: str, **rest: Any) -> Any:
        assert backend == "nccl"
        calls.groups.append(list(ranks))
        return new_group(ranks, backend="gloo", **rest)

    class Stream(ThreadStream):
        def __init__(self, device: torch.device) -> None:
            super().__init__("as of a GPU")

        def submit(self, work: Callable[[], Traffic], label: str, after: Sequence[Pending] = ()) -> Pending:
            calls.submitted.append(label)
            return super().submit(work, label, after)

        def close(self) -> bool:
            calls.waited += 1
            return super().close()

        def abandon(self) -> None:
            calls.abandon += 1
            super().abandon()

    class Transport(NcclTransport):
        def _operation(self, scale: float, buffer: torch.Tensor) -> Any:
            # Gloo neither takes means nor scales beforehand.
            buffer.mul_(scale)
            return dist.ReduceOp.SUM

        def close(self) -> None:
            calls.ended += 1
            super().close()

    with (
        patch.object(World, "backend", "nccl"),
        patch("paceline.comm.connect.dist.new_group", gloo),
        # Gloo has one order for what NCCL and control messages do each by themselves.
        patch("paceline.comm.connect._group_of_all", lambda: new_group(backend="gloo")),
        patch("paceline.comm.connect.CudaStream", Stream),
        patch("paceline.comm.connect.NcclTransport", Transport),
    ):
        yield calls
