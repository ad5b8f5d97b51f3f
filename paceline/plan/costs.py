"""What each op of a schedule takes on given hardware: work and links made the costs that `simulate` asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import Costs
from paceline.core.strategy import Strategy
from paceline.plan.hardware import Hardware
from paceline.plan.kernels import moving, total
from paceline.plan.network import Spread, seconds, spread
from paceline.plan.recomputed import recomputed_units
from paceline.plan.work import Operation, UnitWork, Work

OPTIMIZER_BYTES = 28
"""Bytes that Adam reads and writes for each fp32 parameter: weight, gradient and two states in, three of them out."""


@dataclass(frozen=True)
class UnitSeconds:
    """What a unit takes in one micro-batch.

    Attributes:
        forward: Seconds of its forward pass.
        backward: Of its backward pass, without what is computed again.
        recompute: Of what is computed again before it.
    """

    forward: float
    backward: float
    recompute: float = 0.0


def unit_seconds(work: Work, hardware: Hardware, strategy: Strategy) -> dict[str, UnitSeconds]:
    """Seconds of each unit by its name.

    Args:
        work: One micro-batch.
        hardware: The device.
        strategy: Says which units are recomputed, and what of them.
    """
    known: dict[int, float] = {}

    def cost(operations: tuple[Operation, ...]) -> float:
        # Blocks alike share their tuples; a model of 100 of them costs as much as one.
        if id(operations) not in known:
            known[id(operations)] = total(operations, hardware)
        return known[id(operations)]

    repeated: dict[int, tuple[Operation, ...]] = {}

    def recomputed(unit: UnitWork) -> tuple[Operation, ...]:
        again = unit.forward if unit.again is None else unit.again
        if id(again) not in repeated:
            keeps = strategy.recompute == "keep_attention"
            repeated[id(again)] = tuple(each for each in again if not (keeps and each.kind == "attention"))
        return repeated[id(again)]

    again = recomputed_units([unit.unit for unit in work.units], strategy)
    found = {}
    for unit in work.units:
        more = cost(recomputed(unit)) if unit.unit in again else 0.0
        found[unit.unit] = UnitSeconds(cost(unit.forward), cost(unit.backward), more)
    return found


def step_costs(work: Work, hardware: Hardware, schedule: Schedule) -> Costs:
    """Seconds of any op of a schedule.

    A unit's forward and backward are its operations', a recomputed unit's backward has its forward in front. Copies
    between gradients and buckets, and casts, move their bytes once in and once out; the update moves what Adam does.
    Where gradients are sharded, a rank reads its own once for the squares that ranks add up. A collective takes what
    `network.seconds` says of its bytes.

    Args:
        work: One micro-batch; names of its units are those of the schedule's layout.
        hardware: Devices and links.
        schedule: Gives strategy, groups and sizes.
    """
    return costs_of(unit_seconds(work, hardware, schedule.strategy), hardware, schedule)


def collective_costs(hardware: Hardware, schedule: Schedule) -> Costs:
    """Seconds of a schedule's collectives."""
    sizes = {
        "": Spread(1, 1),
        "world": spread(schedule.world_size, hardware.devices_per_host),
        "shard": spread(schedule.shards, hardware.devices_per_host),
        "replicate": spread(schedule.world_size // schedule.shards, hardware.devices_per_host, schedule.shards),
    }
    return lambda op: seconds(op.kind, op.bytes, sizes[op.group], hardware)


def costs_of(computed: Mapping[str, UnitSeconds], hardware: Hardware, schedule: Schedule) -> Costs:
    """`step_costs` where the seconds of units are known."""
    units, collective = dict(computed), collective_costs(hardware, schedule)
    none = UnitSeconds(0.0, 0.0)
    last = schedule.computed_units[-1]
    for name in {"", ROOT} & units.keys() - {last}:
        # What the model does outside of its units, such as the loss, happens where its last one ends.
        outside, own = units[name], units.get(last, none)
        units[last] = UnitSeconds(own.forward + outside.forward, own.backward + outside.backward, own.recompute)

    shards = schedule.shards
    summed = sum(each.numel // shards * each.gradient_itemsize for each in schedule.layout.flats if each.trainable)

    def spans(op: Op) -> int:
        return sum(span.stop - span.start for span in op.writes)

    def costs(op: Op) -> float:
        if op.kind not in COMPUTE:
            return collective(op)
        return hardware.hooks + computing(op)

    def computing(op: Op) -> float:
        if op.kind == "forward":
            return units.get(op.target, none).forward
        if op.kind == "backward":
            unit = units.get(op.target, none)
            return unit.backward + unit.recompute
        if op.kind == "copy_in":
            # Gradients come in the computed precision and lie in the bucket's.
            return moving("copy_in", spans(op) * (2 + 4), hardware)
        if op.kind == "statistics" and shards > 1:
            return moving("squares", summed, hardware)
        if op.kind == "update":
            return moving("update", spans(op) * OPTIMIZER_BYTES, hardware)
        if op.kind in ("cast", "widen"):
            return moving("cast", spans(op) * (4 + 2), hardware)
        return 0.0

    return costs
