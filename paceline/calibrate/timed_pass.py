"""Each operator of a real forward and backward pass with the time that it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.plan.counting import operation
from paceline.plan.work import Operation


class Timed(NamedTuple):
    """One call of an operator."""

    operation: Operation
    seconds: float


def clock() -> Callable[[], float]:
    """What tells how long computing takes: of one thread its time on a core, else the time that goes by.

    The former is the same whoever else has the core in between: other ranks, where these are more than cores, or other
    programs. The operators' own threads are not on the caller's clock, so of several nobody can tell.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class _Clock(TorchDispatchMode):
    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self.now = now
        self.calls: list[Timed] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        began = self.now()
        result = func(*args, **kwargs)
        seconds = self.now() - began
        counted = operation(func, args, kwargs, result)
        if counted is not None:
            self.calls.append(Timed(counted, seconds / counted.count))
        return result


class Pass(NamedTuple):
    """What a forward and backward pass took."""

    calls: list[Timed]
    """Each operator, the lower quartile over passes."""
    seconds: float
    """The whole, without the clock."""


def timed_pass(model: nn.Module, arguments: tuple[Tensor, ...], passes: int, enough: float = float("inf")) -> Pass:
    """Runs a model that returns a loss so many times with the clock, and as often without it.

    Args:
        model: Anything that computes the same each time, on a CPU.
        arguments: What it is called with.
        passes: How often each.
        enough: Seconds after which no other pass begins: of what takes long each one tells more.
    """
    wholes, clocks, now, since = list[float](), list[list[Timed]](), clock(), time.perf_counter()
    for number in range(passes + 1):
        began = now()
        _run(model, arguments)
        whole = now() - began
        with _Clock(now) as seen:
            _run(model, arguments)
        is_enough = time.perf_counter() - since > enough
        if number or is_enough:  # the first one makes memory and threads
            wholes.append(whole)
            clocks.append(seen.calls)
        if is_enough:
            break
    calls = [Timed(each[0].operation, undisturbed([one.seconds for one in each])) for each in zip(*clocks, strict=True)]
    return Pass(calls, undisturbed(wholes))


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile of several times: what others do on the machine lengthens some, and shortens none."""
    return sorted(seconds)[len(seconds) // 4]


def _run(model: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    loss: Tensor = model(*arguments)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
