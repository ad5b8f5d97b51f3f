"""Right models to verify, on an engine with one wrong operation, in parallel jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from paceline.comm.cpu.transport import CpuTransport
from paceline.engine.gradients import Gradients
from paceline.executor.statistics import Statistics
from tests.verify.user_models import build, rank

_broken = contextlib.ExitStack()


@contextlib.contextmanager
def broken_transport(collective: str, label: str, factor: float, when: int = 0) -> Iterator[None]:
    """Scales what a collective on one bucket gives, from its `when`-th call on."""
    run = CpuTransport.run
    calls = 0

    def wrong(
        self: Any, kind: str, buffer: Tensor, target: str, scale: float = 1.0, shard: Tensor | None = None, **more: Any
    ) -> Any:
        nonlocal calls
        traffic = run(self, kind, buffer, target, scale, shard, **more)
        if (kind, target.split(", ")[0]) == (collective, label):
            calls += 1
            if calls > when and collective == "all_gather":
                # What came from the other of two ranks; the own shard is what the optimizer updates.
                buffer.view(2, -1)[1 - rank() % 2].mul_(factor)
            elif calls > when:
                (shard if shard is not None else buffer).mul_(factor)
        return traffic

    with patch.object(CpuTransport, "run", wrong):
        yield


def mend() -> None:
    """Undoes what a model below did to the engine of this process."""
    _broken.close()


def on_broken(context: contextlib.AbstractContextManager[Any]) -> nn.Module:
    net = build()
    if os.environ["WORLD_SIZE"] != "1":
        mend()
        _broken.enter_context(context)
    return net


def wrong_reduce_scatter() -> nn.Module:
    return on_broken(broken_transport("reduce_scatter", "bucket 1", 1.01))


def wrong_all_reduce() -> nn.Module:
    return on_broken(broken_transport("all_reduce", "bucket 1", 1.01))


def wrong_all_gather() -> nn.Module:
    return on_broken(broken_transport("all_gather", "bucket 1", 1.01))


def wrong_all_gather_of_block() -> nn.Module:
    return on_broken(broken_transport("all_gather", "blocks.1 float64", 1.01, when=1))


def wrong_broadcast() -> nn.Module:
    return on_broken(broken_transport("broadcast", "bucket 0", 1.01))


def wrong_counts() -> nn.Module:
    """Sums what loops count wrongly, but not by what ranks check that they are alike."""
    right = Statistics.result
    return on_broken(patch.object(Statistics, "result", lambda self: right(self) * 1.01))


def wrong_copy_in() -> nn.Module:
    """Takes double of one gradient."""
    copy_in = Gradients.copy_in

    def wrong(self: Gradients, indices: Any) -> None:
        indices = list(indices)
        for index in indices:
            if self.flat.schedule.layout.slots[index].spec.name == "blocks.1.outer.weight":
                self._all[index].grad *= 2  # type: ignore[operator]
        copy_in(self, indices)

    return on_broken(patch.object(Gradients, "copy_in", wrong))


def wrong_update() -> nn.Module:
    """The last rank learns faster."""
    step = torch.optim.AdamW.step

    def wrong(self: Any, *args: Any) -> Any:
        if rank() == int(os.environ["WORLD_SIZE"]) - 1:
            self.param_groups[0]["lr"] = 0.011
        return step(self, *args)

    return on_broken(patch.object(torch.optim.AdamW, "step", wrong))
