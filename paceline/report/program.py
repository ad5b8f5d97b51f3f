"""The schedule that a run executed, built again from its settings; known only if what was recorded has its ops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import UserError
from paceline.core.layout import ParameterSpec
from paceline.core.ops import Key, Op
from paceline.core.schedule import Schedule
from paceline.report.recordings import Recording

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig


@dataclass(frozen=True)
class Program:
    """A run's steps as they were scheduled.

    Attributes:
        schedule: Of rank 0.
        micro_batches: Of a step.
        specs: The model's parameters, in registration order.
    """

    schedule: Schedule
    micro_batches: int
    specs: tuple[ParameterSpec, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Rank 0's ops of a step."""
        return self.schedule.step(self.micro_batches)

    @cached_property
    def keys(self) -> frozenset[Key]:
        """What those are called."""
        return frozenset(op.key for op in self.ops)

    @cached_property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """Names of the parameters in each bucket."""
        layout = self.schedule.layout
        return {bucket.name: tuple(layout.slots[slot].spec.name for slot in bucket.slots) for bucket in layout.buckets}

    def suits(self, recording: Recording) -> bool:
        """Whether the planned ops of a recorded step are the schedule's, on every rank that wrote events.

        What follows the update may be missing: it is still under way when a step is written down.
        """
        planned: dict[int, set[Key]] = {rank: set() for rank in recording.ranks}
        for event in recording.events:
            if event.planned:
                planned[event.rank].add(Key(event.kind, event.target, event.micro_batch, event.phase))
        under_way = {op.key for op in self.ops if op.phase == "update" and op.stream != "compute"}
        return all(keys <= self.keys and self.keys - keys <= under_way for keys in planned.values())


def program_of(path: Path, config: TrainConfig, world_size: int) -> Program | None:
    """The program of a run's folder; None if its tokenizer, which gives the model's size, cannot be read."""
    from paceline.core.buffers import statistics_numel
    from paceline.core.build_layout import build_layout
    from paceline.core.build_schedule import build_schedule
    from paceline.core.layout import ROOT
    from paceline.data import Tokenizer
    from paceline.models.on_meta import on_meta
    from paceline.models.transformer import Transformer
    from paceline.models.units import find_units, parameter_specs
    from paceline.train.run_folder import TOKENIZER

    try:
        entries = Tokenizer((path / TOKENIZER).read_text(encoding="utf-8"), str(path / TOKENIZER)).vocabulary
        model = on_meta(lambda: Transformer(config.model.shape(entries)))
        units = tuple(find_units(model, config.strategy.units))
        specs = tuple(parameter_specs(model, units))
        layout = build_layout(specs, (ROOT, *units), config.strategy, world_size)
        schedule = build_schedule(layout, config.strategy, world_size, 0, units, (), statistics_numel(len(specs)))
        return Program(schedule, math.ceil(math.ceil(config.batch / world_size) / config.micro_batch), specs)
    except (UserError, OSError, UnicodeDecodeError):
        return None
