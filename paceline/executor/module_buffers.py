"""Buffers that forwards change: rank 0's go to every rank after a backward, and are in place from the next forward on.

As under DDP, which sends them before a forward, a rank's own stay until then, for loops that read them after a step.
Forwards need no other rank for it: one rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from paceline.buffers.memory import apart, bits_of
from paceline.comm.control import all_gather_json
from paceline.core.ops import Phase
from paceline.core.schedule import Schedule
from paceline.executor.collectives import Collectives
from paceline.executor.executor import Executor
from paceline.tensors.version import version_of


class ModuleBuffers:
    """The buffers of one model, and which of them are sent.

    Those that no forward changes cost nothing. Ranks agree on the others when one of them first sees a change, and from
    then on all take part in sending them: at the end of a synchronised backward, and when an optimizer has stepped.
    What has arrived waits for the next forward of any kind.

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
        self._arrived: list[tuple[tuple[Tensor, bool], Tensor, Tensor]] = []
        """Buffers of this rank, whether they are statistics of `_normalises`, their bytes as they were when rank 0's
        were sent, and rank 0's."""
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self.take()

    def take(self) -> None:
        """Takes the buffers as they are now for unchanged."""
        self._seen = {name: (buffer, version_of(buffer)) for name, buffer, _ in self._all()}

    def _all(self) -> Iterator[tuple[str, Tensor, nn.Module]]:
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}" if path else name, buffer, module

    def unknown(self) -> int:
        """Returns the number of buffers that were changed on this rank and that ranks have not agreed to send."""
        return sum(1 for _ in self._unknown())

    def _unknown(self) -> Iterator[str]:
        for name, buffer, module in self._all():
            if name in self._own or self.sent.get(name) == _description(buffer):
                continue
            seen, version = self._seen.get(name, (None, 0))
            if seen is not buffer or version != version_of(buffer) or _normalises(module):
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

    def send(
        self, schedule: Schedule, executor: Executor, collectives: Collectives, micro_batch: int, phase: Phase
    ) -> None:
        """Sends rank 0's, which wait for `adopt`. A collective call."""
        if not self.sent:
            return
        self._arrived.clear()
        with torch.inference_mode(False), torch.no_grad():
            parts: dict[int, tuple[Tensor, bool]] = {}
            for name, buffer, module in self._all():
                if name in self.sent and buffer.numel():
                    parts[id(buffer)] = apart(buffer), _normalises(module)
            if parts:
                flat = torch.cat([bits_of(buffer) for buffer, _ in parts.values()])
                own = flat.clone() if schedule.rank else flat
                op = schedule.send_buffers(micro_batch, phase, flat.numel())
                executor.run([op], collectives.carry_out(op, flat, None))
                if schedule.rank:
                    sizes = [buffer.nbytes for buffer, _ in parts.values()]
                    self._arrived += zip(parts.values(), own.split(sizes), flat.split(sizes), strict=True)
        self.take()

    def adopt(self) -> None:
        """Puts in place what has arrived, but where the loop has written to a buffer since it was sent."""
        if not self._arrived:
            return
        with torch.inference_mode(False), torch.no_grad():
            for (buffer, are_statistics), own, sent in self._arrived:
                bits, version = bits_of(buffer), version_of(buffer)
                # Without asking a GPU, for which the host would wait.
                values = torch.where((bits == own).all(), sent, bits)
                if buffer.is_cpu and torch.equal(values, bits):
                    # Another model that has it, too, may have a graph that keeps it.
                    continue
                buffer.copy_(values.view(buffer.dtype).view(buffer.shape))
                if are_statistics:
                    # A graph that is yet to run backward keeps these, and computes nothing with them.
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
        self._arrived.clear()
        self.take()


def send_first_ranks(buffers: Iterable[Tensor], send: Callable[[Iterable[Tensor]], None]) -> None:
    """Gives every rank rank 0's buffers; one that has them already stays as it is, as for another model's graph.

    Args:
        buffers: Of a model.
        send: Gives every rank rank 0's values of tensors. A collective call.
    """
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers]
    send(copied for _, copied in copies)
    with torch.no_grad():
        for buffer, copied in copies:
            if not torch.equal(buffer, copied):
                buffer.copy_(copied)


def _normalises(module: nn.Module) -> bool:
    """Whether a module's forward writes to its statistics, and leaves their version: it computes by the batch's own."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training


def _description(buffer: Tensor) -> list[object]:
    return [list(buffer.shape), str(buffer.dtype)]
