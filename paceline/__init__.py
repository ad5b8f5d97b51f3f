"""paceline: data-parallel training for PyTorch.

import paceline as pl

pl.init()
model = pl.parallelize(MyModel(), pl.Strategy())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm.transport import CommunicationError
    from paceline.comm.world import World, all_gather_json, barrier, init, shutdown
    from paceline.engine.loss_scale import GradScaler
    from paceline.engine.optimizers import elementwise
    from paceline.engine.parallel import (
        accumulate,
        broadcast_buffers,
        clip_grad_norm_,
        engine_of,
        full_parameters,
        parallelize,
        release,
        reset,
    )
    from paceline.engine.progress import EngineError
    from paceline.errors import UserError
    from paceline.events import Event
    from paceline.layout import Layout, build_layout
    from paceline.ops import Op
    from paceline.schedule import Schedule
    from paceline.strategy import SYSTEMS, Strategy

__version__ = "0.1.0.dev0"

_HOMES = {
    "paceline.comm.transport": ("CommunicationError",),
    "paceline.engine.loss_scale": ("GradScaler",),
    "paceline.engine.optimizers": ("elementwise",),
    "paceline.engine.progress": ("EngineError",),
    "paceline.comm.world": ("World", "all_gather_json", "barrier", "init", "shutdown"),
    "paceline.engine.parallel": (
        "accumulate",
        "broadcast_buffers",
        "clip_grad_norm_",
        "engine_of",
        "full_parameters",
        "parallelize",
        "release",
        "reset",
    ),
    "paceline.errors": ("UserError",),
    "paceline.events": ("Event",),
    "paceline.layout": ("Layout", "build_layout"),
    "paceline.ops": ("Op",),
    "paceline.schedule": ("Schedule",),
    "paceline.strategy": ("SYSTEMS", "Strategy"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SYSTEMS",
    "CommunicationError",
    "EngineError",
    "Event",
    "GradScaler",
    "Layout",
    "Op",
    "Schedule",
    "Strategy",
    "UserError",
    "World",
    "__version__",
    "accumulate",
    "all_gather_json",
    "barrier",
    "broadcast_buffers",
    "build_layout",
    "clip_grad_norm_",
    "elementwise",
    "engine_of",
    "full_parameters",
    "init",
    "parallelize",
    "release",
    "reset",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    """Imports public names when they are first used, so that the command line starts without loading torch."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
