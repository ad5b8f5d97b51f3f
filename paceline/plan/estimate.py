"""What a setting costs: a step's time by where it goes, and a rank's memory by kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.strategy import Strategy
from paceline.plan.bound import Bound
from paceline.plan.footprint import Footprint


@dataclass(frozen=True)
class Setting:
    """How a step is made.

    Attributes:
        strategy: How ranks share it.
        samples: Of a micro-batch on one rank.
        micro_batches: Of a step on each rank.
    """

    strategy: Strategy
    samples: int
    micro_batches: int


@dataclass(frozen=True)
class Estimate:
    """What a setting costs.

    Attributes:
        setting: The setting.
        devices: Ranks.
        compute: Seconds of a step that go to forward and backward, recomputing and copies of gradients included.
        slowed: Seconds of these by which computing is longer because something is communicated beside it.
        exposed: Seconds that computing stands still for communication, by collective.
        optimizer: Seconds of the update.
        bubble: Seconds that ranks wait for the slowest of them.
        tokens: Of a step on all devices.
        flops: Floating-point operations that the model needs for a step on one device.
        peak_flops: Floating-point operations a second by the device's datasheet, in the setting's precision.
        memory: Bytes that a rank holds at its fullest, by kind.
        capacity: Bytes that the device has.
        bound: What most of the step goes to.
        sent: Bytes that a rank sends in a step.
    """

    setting: Setting
    devices: int
    compute: float
    slowed: float
    exposed: Mapping[str, float]
    optimizer: float
    bubble: float
    tokens: int
    flops: float
    peak_flops: float
    memory: Footprint
    capacity: int
    bound: Bound
    sent: int

    @property
    def communication(self) -> float:
        """Seconds that computing stands still for collectives."""
        return sum(self.exposed.values())

    @property
    def network(self) -> float:
        """Seconds of a step that a network without limits would save: waiting, and computing slower beside it."""
        return self.communication + self.slowed

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.communication + self.optimizer + self.bubble

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s as a share of the datasheet's peak."""
        return self.flops / self.seconds / self.peak_flops

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.spare >= 0

    @property
    def spare(self) -> int:
        """Bytes that are left of the device; negative: what is missing."""
        return self.capacity - self.memory.peak

    @property
    def name(self) -> str:
        """The setting in words, such as "zero 3, groups of 8"."""
        return name_of(self.setting.strategy)


def name_of(strategy: Strategy) -> str:
    """What is sharded among whom, such as "zero 3, groups of 8"."""
    return f"zero {strategy.stage}" + (f", groups of {strategy.shard}" if strategy.shard else "")
