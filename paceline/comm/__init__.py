"""Communication between ranks: collectives, and the transports that carry them out."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "why",
]


def __getattr__(name: str) -> Any:
    # Late, so that profiles are read without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("paceline.comm.collectives"), name)
