"""Buffers that forwards change: rank 0's go to every rank after a step, and are in place from its next forward on.

As under DDP, which sends them before a forward, a rank's own stay until then, for loops that read them after a step.
Forwards need no other rank for it: one rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.buffers.memory import apart
from paceline.comm.control import all_gather_json
from paceline.core.schedule import Schedule
from paceline.executor.collectives import Collectives
from paceline.executor.executor import Executor


class ModuleBuffers:
    """The buffers of one model, and which of them are sent.

    Those that no forward changes cost nothing. Ranks agree on the others when one of them first sees a change, and from
    then on all take part in sending them: when an optimizer has stepped, or else before the next forward of training.
    What has arrived waits for the next forward of any kind, when no graph needs the former values.

    Attributes:
        sent: Names of those that are sent, the same on every rank.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Takes the buffers as they are now for the same on every rank."""
        self._device = device
        self._modules = list(module.named_modules())
        self.sent: dict[str, list[object]] = {}
        self._own: set[str] = set()
        """Names of those that are each rank's own, as they are of other shapes on each."""
        self._is_due = False
        self._arrived: list[tuple[Tensor, Tensor, Tensor]] = []
        """Buffers of this rank, their elements as they were when rank 0's were sent, and rank 0's."""
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self.take()

    def take(self) -> None:
        """Takes the buffers as they are now for unchanged."""
        self._seen = {name: (buffer, _version(buffer)) for name, buffer, _ in self._all()}

    def _all(self) -> Iterator[tuple[str, Tensor, nn.Module]]:
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}" if path else name, buffer, module

    def unknown(self) -> int:
        """How many buffers were changed on this rank that ranks have not agreed on."""
        return sum(1 for _ in self._unknown())

    def _unknown(self) -> Iterator[str]:
        for name, buffer, module in self._all():
            if name in self._own or self.sent.get(name) == _description(buffer):
                continue
            seen, version = self._seen.get(name, (None, 0))
            # The kernel of BatchNorm writes to running statistics without moving their version on.
            normalises = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
            if seen is not buffer or version != _version(buffer) or normalises:
                yield name

    def agree(self) -> None:
        """Lets ranks agree on the buffers that are sent from now on. A collective call."""
        described = {
            name: _description(buffer)
            for name, buffer, _ in self._all()
            if buffer.layout == torch.strided and buffer.device == self._device
        }
        told = all_gather_json([list(self._unknown()), described], "buffers that a forward changed")
        wanted = sorted({*self.sent, *(name for names, _ in told for name in names)})
        self.sent = {
            name: described[name]
            for name in wanted
            if name in described and all(theirs.get(name) == described[name] for _, theirs in told)
        }
        self._own.update(name for name in wanted if name not in self.sent)

    def step_over(self) -> None:
        """A synchronised backward has ended."""
        self._is_due = bool(self.sent)
        self.take()

    def send(self, schedule: Schedule, executor: Executor, collectives: Collectives | None, micro_batch: int) -> None:
        """Sends rank 0's, if a step was over since they were last sent. A collective call."""
        if not self._is_due or collectives is None:
            return
        self._is_due = False
        with torch.inference_mode(False), torch.no_grad():
            by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
            for name, buffer, _ in self._all():
                if name in self.sent and buffer.numel():
                    by_dtype.setdefault(buffer.dtype, {})[id(buffer)] = apart(buffer)
            for dtype, buffers in by_dtype.items():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers.values()])
                own = flat.clone() if schedule.rank else flat
                op = schedule.send_buffers(str(dtype).removeprefix("torch."), micro_batch, flat.numel(), flat.itemsize)
                executor.run([op], collectives.carry_out(op, flat.view(torch.uint8), None))
                if schedule.rank:
                    sizes = [buffer.numel() for buffer in buffers.values()]
                    self._arrived += zip(buffers.values(), own.split(sizes), flat.split(sizes), strict=True)

    def adopt(self) -> None:
        """Puts in place what has arrived, but where the loop has written to a buffer since it was sent."""
        if not self._arrived:
            return
        with torch.inference_mode(False), torch.no_grad():
            for buffer, own, sent in self._arrived:
                elements = buffer.reshape(-1)
                # Without asking a GPU, for which the host would wait.
                untouched = ((elements == own) | (elements.isnan() & own.isnan())).all()
                buffer.copy_(torch.where(untouched, sent, elements).view(buffer.shape))
        self._arrived = []
        self.take()

    def reset(self) -> None:
        """The step under way is given up."""
        self._is_due = False


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _description(buffer: Tensor) -> list[object]:
    return [list(buffer.shape), str(buffer.dtype)]
