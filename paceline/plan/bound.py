"""What binds a step: throughput is the least of what compute, memory and network allow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paceline.plan.hardware import Hardware
from paceline.plan.kernels import seconds
from paceline.plan.work import Operation, Work

Bound = Literal["compute", "memory bandwidth", "kernel launches", "network", "slowest rank"]


@dataclass(frozen=True)
class Spent:
    """Seconds of a micro-batch's kernels by what bounds each of them.

    Attributes:
        compute: Multiplying matrices, attention included.
        moving: Reading and writing the device's memory.
        launching: What the host takes to launch kernels beyond what these take.
        moved: Bytes of those that read and write memory.
    """

    compute: float = 0.0
    moving: float = 0.0
    launching: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.compute + other.compute,
            self.moving + other.moving,
            self.launching + other.launching,
            self.moved + other.moved,
        )


def spent(work: Work, hardware: Hardware) -> Spent:
    """Seconds of a micro-batch's forward and backward, by what bounds them."""
    known: dict[int, Spent] = {}
    whole = Spent()
    for unit in work.units:
        for operations in (unit.forward, unit.backward):
            # Blocks alike share their operations.
            if id(operations) not in known:
                known[id(operations)] = _spent(operations, hardware)
            whole += known[id(operations)]
    return whole


def _spent(operations: Iterable[Operation], hardware: Hardware) -> Spent:
    compute = moving = launches = moved = 0.0
    for operation in operations:
        took = seconds(operation, hardware)
        if took > seconds(replace(operation, kind="memory", flops=0.0), hardware):
            compute += took
        else:
            moving += took
            moved += operation.bytes * operation.count
        launches += operation.count * hardware.kernels.launch
    return Spent(compute, moving, max(0.0, launches - compute - moving), moved)


def binding(spent: Spent, split: Mapping[str, float]) -> Bound:
    """What most of a step goes to.

    Args:
        spent: Of a micro-batch's forward and backward, which the step's computing is divided by.
        split: Seconds of the step: compute, communication, optimizer, bubble.
    """
    whole = spent.compute + spent.moving + spent.launching or 1.0
    shares: dict[Bound, float] = {
        "compute": split["compute"] * spent.compute / whole,
        "memory bandwidth": split["compute"] * spent.moving / whole + split["optimizer"],
        "kernel launches": split["compute"] * spent.launching / whole,
        "network": split["communication"],
        "slowest rank": split["bubble"],
    }
    return max(shares, key=lambda name: shares[name])
