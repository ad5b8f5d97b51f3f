"""What each op of a schedule takes on given hardware: work and links made the costs that `simulate` asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import Costs
from paceline.plan.hardware import Hardware
from paceline.plan.kernels import moving, total
from paceline.plan.network import Spread, seconds, spread
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


def unit_seconds(work: Work, hardware: Hardware, recompute: str = "none", every: int = 1) -> dict[str, UnitSeconds]:
    """Seconds of each unit by its name.

    Args:
        work: One micro-batch.
        hardware: The device.
        recompute: As `Strategy.recompute`.
        every: As `Strategy.recompute_every`: only every so many of the units that repeat.
    """
    known: dict[int, float] = {}

    def cost(operations: tuple[Operation, ...]) -> float:
        # Blocks alike share their tuples; a model of 100 of them costs as much as one.
        if id(operations) not in known:
            known[id(operations)] = total(operations, hardware)
        return known[id(operations)]

    again = dict(_recomputed(work, recompute, every))
    found = {}
    for unit in work.units:
        repeated = again.get(unit.unit)
        found[unit.unit] = UnitSeconds(
            cost(unit.forward), cost(unit.backward), 0.0 if repeated is None else total(repeated, hardware)
        )
    return found


def _recomputed(work: Work, recompute: str, every: int) -> Iterator[tuple[str, tuple[Operation, ...]]]:
    if recompute == "none":
        return
    for index, unit in enumerate(repeated_units(work)):
        if (index + 1) % every == 0:
            kept = recompute == "keep_attention"
            yield unit.unit, tuple(op for op in unit.forward if not (kept and op.kind == "attention"))


def repeated_units(work: Work) -> list[UnitWork]:
    """The units that are alike but for their number, such as a Transformer's blocks: those that are recomputed."""
    return [unit for unit in work.units if unit.unit.rpartition(".")[2].isdigit()]


def step_costs(work: Work, hardware: Hardware, schedule: Schedule) -> Costs:
    """Seconds of any op of a schedule.

    A unit's forward and backward are its operations', a recomputed unit's backward has its forward in front. Copies
    between gradients and buckets, and casts, move their bytes once in and once out; the update moves what Adam does. A
    collective takes what `network.seconds` says of its bytes.

    Args:
        work: One micro-batch; names of its units are those of the schedule's layout.
        hardware: Devices and links.
        schedule: Gives strategy, groups and sizes.
    """
    strategy = schedule.strategy
    units = unit_seconds(work, hardware, strategy.recompute, strategy.recompute_every)
    sizes = {
        "": Spread(1, 1),
        "world": spread(schedule.world_size, hardware.devices_per_host),
        "shard": spread(schedule.shards, hardware.devices_per_host),
        "replicate": spread(schedule.world_size // schedule.shards, hardware.devices_per_host, schedule.shards),
    }
    none = UnitSeconds(0.0, 0.0)
    last = schedule.computed_units[-1]
    for name in {"", ROOT} & units.keys() - {last}:
        # What the model does outside of its units, such as the loss, happens where its last one ends.
        outside, own = units[name], units.get(last, none)
        units[last] = UnitSeconds(own.forward + outside.forward, own.backward + outside.backward, own.recompute)

    def spans(op: Op) -> int:
        return sum(span.stop - span.start for span in op.writes)

    def costs(op: Op) -> float:
        if op.kind not in COMPUTE:
            return seconds(op.kind, op.bytes, sizes[op.group], hardware)
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
        if op.kind == "update":
            return moving("update", spans(op) * OPTIMIZER_BYTES, hardware)
        if op.kind == "cast":
            return moving("cast", spans(op) * (4 + 2), hardware)
        return 0.0

    return costs
