"""Programs that name no device, run on one: what they make lies there, with the numbers that a CPU draws."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import paceline
from tests.gpu.one_device import one_device
from tests.ranks import RankPool

_PACELINE, _TORCH = (str(Path(str(package.__file__)).parent) for package in (paceline, torch))
_OPTIMIZERS = f"{_TORCH}/optim/"
"""Which choose devices for what they keep."""


class Placed(TorchFunctionMode):
    """Inside, tensors that a program makes lie on a device; not what paceline makes for itself."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in _device_constructors() or kwargs.get("device") is not None or not _is_of_a_program():
            return made
        needs = made.requires_grad
        return made.detach().to(self._device).requires_grad_(needs)


def _is_of_a_program() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS):
            return False
        if not name.startswith(_TORCH) and name != __file__:
            return not name.startswith(_PACELINE)
        frame = frame.f_back  # type: ignore[assignment]
    return True


def on(device: str, function: Callable[..., Any], *args: Any) -> bytes:
    """What a function returns on a rank whose tensors lie on a device."""
    with Placed(device):
        found = function(*args)
    sink = io.BytesIO()
    torch.save(found, sink)
    return sink.getvalue()


class PlacedPool(RankPool):
    """Ranks that share the first GPU, and have what they make there."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(device, one_device if device == "cuda" else nullcontext)

    def __call__(self, n: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        found = super().__call__(n, on, self._device, function, *args, **options)
        return [torch.load(io.BytesIO(each), weights_only=False) for each in found]

    def start(self, n: int, timeout: float) -> None:
        """Starts ranks, each of whose contexts on a GPU takes seconds."""
        self(n, torch.ones, 1, timeout=timeout)
