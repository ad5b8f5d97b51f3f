"""The exact part of a plan: bytes held and bytes sent at each stage of ZeRO, from layout and schedule alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import nn

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.layout import ROOT, ParameterSpec
from paceline.core.memory import Memory, memory
from paceline.core.ops import COMPUTE
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.models.units import find_units, parameter_specs

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds of collective that the stages use."""


@dataclass(frozen=True)
class Shapes:
    """All that a plan needs to know of a model."""

    parameters: tuple[ParameterSpec, ...]
    units: tuple[str, ...]
    """In the order in which they are registered, which is taken for that of the forward pass."""

    buffers: int = 0
    """Bytes of the model's buffers, whole on every rank, in their own types."""

    @cached_property
    def numel(self) -> int:
        """Number of parameters; shared ones count once."""
        return sum(spec.numel for spec in self.parameters)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the parameters' dtypes."""
        return tuple(dict.fromkeys(spec.dtype for spec in self.parameters))


def shapes(model: nn.Module) -> Shapes:
    """The shapes of a model, on any device."""
    units = tuple(find_units(model))
    buffers = {id(each): each.numel() * each.itemsize for each in model.buffers()}
    return Shapes(tuple(parameter_specs(model, units)), units, sum(buffers.values()))


@dataclass(frozen=True)
class Row:
    """What one strategy costs one rank."""

    strategy: Strategy
    memory: Memory
    sent: dict[str, int]
    """Bytes that a rank sends in a step, by collective."""
    padding: int
    """Bytes in a whole copy of the trainable parameters that hold none."""
    communicators: int
    """How many a rank holds between GPUs, where the few numbers that ranks agree on share the job's own."""

    @property
    def name(self) -> str:
        """The stage in words, such as "zero 3, groups of 8"."""
        groups = f", groups of {self.strategy.shard}" if self.strategy.shard else ""
        return f"zero {self.strategy.stage}{groups}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, in bytes."""
        return {
            "zero": self.strategy.stage,
            "shard": self.strategy.shard,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "sent": {**self.sent, "total": sum(self.sent.values())},
            "padding": self.padding,
            "communicators": self.communicators,
        }


def row(model: Shapes, strategy: Strategy, devices: int, micro_batches: int = 1) -> Row:
    """What a strategy costs one rank with Adam.

    Raises:
        UserError: The strategy does not suit the number of devices.
    """
    strategy.shards(devices)
    layout = build_layout(model.parameters, (ROOT, *model.units), strategy, devices)
    schedule = build_schedule(layout, strategy, devices, rank=0, order=model.units)
    held, sent = memory(schedule, micro_batches), _sent(schedule, micro_batches)
    return Row(strategy, held, sent, layout.padding_bytes, len(schedule.groups))


def _sent(schedule: Schedule, micro_batches: int) -> dict[str, int]:
    sent = Counter(dict.fromkeys(COLLECTIVES, 0))
    for op in schedule.step(micro_batches):
        if op.kind not in COMPUTE:
            sent[op.kind] += op.sent
    return dict(sent)


def strategies(shard: int, precision: str) -> Sequence[Strategy]:
    """Every stage of ZeRO over all ranks, and stage 3 in groups of `shard` ranks if that is not 0.

    Raises:
        UserError: `shard` is no size of a group.
    """
    chosen: dict[str, Any] = {"precision": precision}
    stages: list[Strategy] = [Strategy(zero=stage, **chosen) for stage in (0, 1, 2, 3)]
    return [*stages, *([Strategy(zero=3, shard=shard, **chosen)] if shard else [])]
