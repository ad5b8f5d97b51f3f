"""paceline: data-parallel training for PyTorch.

import paceline as pl

world = pl.init()
model = pl.parallelize(MyModel(), pl.Strategy())

`help(pl.parallelize)`, `help(pl.Strategy)` and so on tell what each name does.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.load import Loaded, load
    from paceline.checkpoint.save import save
    from paceline.checkpoint.saving import Saving
    from paceline.comm.control import all_gather_json, barrier
    from paceline.comm.transport import CommunicationError
    from paceline.comm.world import World, init, shutdown
    from paceline.core.build_layout import build_layout
    from paceline.core.errors import EngineError, UserError
    from paceline.core.events import Event
    from paceline.core.layout import Layout
    from paceline.core.ops import Op
    from paceline.core.schedule import Schedule
    from paceline.core.strategy import SYSTEMS, Strategy
    from paceline.engine.accumulate import accumulate
    from paceline.engine.api import (
        broadcast_buffers,
        clip_grad_norm_,
        engine_of,
        full_parameters,
        full_state_dict,
        parallelize,
        release,
        reset,
    )
    from paceline.optimizers.elementwise import elementwise
    from paceline.optimizers.grad_scaler import GradScaler
    from paceline.plan.check import check
    from paceline.report.recorded_loop import report
    from paceline.report.recording import record
    from paceline.verify.replicas import check_replicas

__version__ = "0.1.0"

_HOMES = {
    "paceline.comm.transport": ("CommunicationError",),
    "paceline.optimizers.grad_scaler": ("GradScaler",),
    "paceline.optimizers.elementwise": ("elementwise",),
    "paceline.report.recording": ("record",),
    "paceline.verify.replicas": ("check_replicas",),
    "paceline.comm.control": ("all_gather_json", "barrier"),
    "paceline.comm.world": ("World", "init", "shutdown"),
    "paceline.engine.accumulate": ("accumulate",),
    "paceline.engine.api": (
        "broadcast_buffers",
        "clip_grad_norm_",
        "engine_of",
        "full_parameters",
        "full_state_dict",
        "parallelize",
        "release",
        "reset",
    ),
    "paceline.checkpoint.load": ("Loaded", "load"),
    "paceline.checkpoint.save": ("save",),
    "paceline.checkpoint.saving": ("Saving",),
    "paceline.core.errors": ("EngineError", "UserError"),
    "paceline.core.events": ("Event",),
    "paceline.plan.check": ("check",),
    "paceline.report.recorded_loop": ("report",),
    "paceline.core.build_layout": ("build_layout",),
    "paceline.core.layout": ("Layout",),
    "paceline.core.ops": ("Op",),
    "paceline.core.schedule": ("Schedule",),
    "paceline.core.strategy": ("SYSTEMS", "Strategy"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SYSTEMS",
    "CommunicationError",
    "EngineError",
    "Event",
    "GradScaler",
    "Layout",
    "Loaded",
    "Op",
    "Saving",
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
    "check",
    "check_replicas",
    "clip_grad_norm_",
    "elementwise",
    "engine_of",
    "full_parameters",
    "full_state_dict",
    "init",
    "load",
    "parallelize",
    "record",
    "release",
    "report",
    "reset",
    "save",
    "shutdown",
]


def __dir__() -> list[str]:
    """The public names, which tab completion shows."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Imports public names when they are first used, so that the command line starts without loading torch."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


class _Package(ModuleType):
    """A public name stays what it is where a subpackage has that name, too, which importing would put in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
