"""A run's program with another stage, bucket size or number of devices, by the builder of its own. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.report.program import Program

STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
_MOST_DEVICES = 64
_MOST_BUCKETS = 32
"""Of a model: more than these are not what bucket sizes are tried for."""
_MOST_OPS = 60_000
"""In the programs of all combinations together, so that a page stays small and is soon written."""


@dataclass(frozen=True)
class Setting:
    """What a program is built for, besides the run's model and its other settings.

    Attributes:
        stage: Of ZeRO.
        devices: How many ranks.
        bucket_mb: Size of a bucket in MiB.
    """

    stage: Literal[0, 1, 2, 3]
    devices: int
    bucket_mb: float


@dataclass(frozen=True)
class Choices:
    """What can be chosen from, in ascending order; the run's own is among each."""

    stages: Sequence[Literal[0, 1, 2, 3]]
    devices: Sequence[int]
    bucket_mb: Sequence[float]


def own_setting(program: Program) -> Setting:
    """The run's."""
    schedule = program.schedule
    return Setting(schedule.strategy.stage, schedule.world_size, schedule.strategy.bucket_mb)


def choices(program: Program) -> Choices:
    """Powers of two devices, and of two MiB from many buckets for the model to one; fewer where programs are long."""
    own = own_setting(program)
    whole = sum(bucket.numel * bucket.gradient_itemsize for bucket in program.schedule.layout.buckets) / 2**20
    sizes = [2.0**power for power in range(-20, 20) if whole / _MOST_BUCKETS <= 2.0**power < 2 * whole]
    devices = sorted({*(2**power for power in range(_MOST_DEVICES.bit_length())), own.devices})
    buckets = sorted({*sizes, own.bucket_mb})
    while len(STAGES) * len(devices) * len(buckets) * len(program.ops) > _MOST_OPS and len(devices) * len(buckets) > 1:
        # The farther of the two ends goes.
        longer, kept = (devices, own.devices) if len(devices) > len(buckets) else (buckets, own.bucket_mb)
        longer.pop(0 if 2 * longer.index(kept) >= len(longer) else -1)
    return Choices(STAGES, devices, buckets)


def variant(program: Program, setting: Setting, rank: int) -> Schedule:
    """The schedule of one rank with another setting.

    What means nothing without shards is left out at stage 0, and what only stage 3 has elsewhere.

    Raises:
        UserError: The settings contradict the run's others.
    """
    if setting == own_setting(program):
        return replace(program.schedule, rank=rank)
    known = program.schedule.strategy
    strategy = replace(
        known,
        zero=setting.stage,
        bucket_mb=setting.bucket_mb,
        shard=known.shard if setting.stage else 0,
        share_parameters=known.share_parameters and setting.stage > 0,
        prefetch=known.prefetch if setting.stage == 3 else Strategy.prefetch,
        accumulation="auto" if known.accumulation == "hold" and setting.stage != 3 else known.accumulation,
    )
    return scheduled(program, strategy, setting.devices, min(rank, setting.devices - 1))


def scheduled(program: Program, strategy: Strategy, devices: int, rank: int = 0) -> Schedule:
    """The schedule of the run's model by another strategy.

    Raises:
        UserError: The strategy does not suit the number of devices.
    """
    if devices > 1:
        strategy.shards(devices)
    else:
        strategy = replace(strategy, shard=0)
    own = program.schedule
    layout = build_layout(program.specs, own.layout.units, strategy, devices)
    return build_schedule(layout, strategy, devices, rank, own.order, own.deferred, statistics=own.statistics)
