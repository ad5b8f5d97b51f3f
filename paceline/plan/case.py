"""One model on so many devices: what any setting of it takes and holds, by the engine's own schedule. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.layout import ROOT
from paceline.core.ops import COMPUTE, Op
from paceline.core.schedule import Schedule
from paceline.core.simulate import Links, Timeline, timeline
from paceline.core.strategy import Strategy
from paceline.plan.bound import Spent, binding, spent
from paceline.plan.costs import UnitSeconds, collective_costs, costs_of, unit_seconds
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.footprint import FREE, Footprint, footprint
from paceline.plan.hardware import Hardware
from paceline.plan.network import unhindered
from paceline.plan.subject import Subject

STEPS = 2
"""Simulated; what the first sends after its update is under way as the second begins, as in every later one."""
ALIKE = 3
"""Micro-batches that are simulated at most: those between the first and the last of a step all take the same."""

_UPDATES = ("update", "cast")


@dataclass(frozen=True)
class Case:
    """A model, machines, and a number of devices. What settings have in common is built once.

    Attributes:
        subject: The model.
        hardware: The machines.
        devices: Ranks, one on each.
        slow_rank: How many times as long one of the ranks computes, for which all others wait.
    """

    subject: Subject
    hardware: Hardware
    devices: int
    slow_rank: float = 1.0
    _schedules: dict[Strategy, Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)
    _steps: dict[tuple[Strategy, int], tuple[Op, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _computing: dict[tuple[int, str, str, int], Mapping[str, UnitSeconds]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _spent: dict[tuple[int, str], Spent] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def capacity(self) -> int:
        """Bytes of a device that a setting may hold."""
        return int(self.hardware.device.memory * (1 - FREE))

    def schedule(self, strategy: Strategy) -> Schedule:
        """The engine's schedule of any rank.

        Raises:
            UserError: The strategy does not suit the number of devices.
        """
        if strategy not in self._schedules:
            base = without_recompute(strategy)
            if base == strategy:
                strategy.shards(self.devices)
                shapes = self.subject.shapes
                layout = build_layout(shapes.parameters, (ROOT, *shapes.units), strategy, self.devices)
                self._schedules[strategy] = build_schedule(layout, strategy, self.devices, rank=0, order=shapes.units)
            else:
                self._schedules[strategy] = replace(self.schedule(base), strategy=strategy)
        return self._schedules[strategy]

    def footprint(self, setting: Setting) -> Footprint:
        """What a rank holds.

        Raises:
            UserError: The strategy does not suit the number of devices.
        """
        strategy = setting.strategy
        schedule, work = self.schedule(strategy), self.subject.work(setting.samples, strategy.precision)
        framework, buffers = self.hardware.framework, self.subject.shapes.buffers
        return footprint(work, schedule, setting.micro_batches, framework=framework, buffers=buffers)

    def estimate(self, setting: Setting) -> Estimate:
        """What a step takes and holds.

        Raises:
            UserError: The strategy does not suit the number of devices, or the device does not compute in its
                precision.
        """
        hardware, precision = self.hardware, setting.strategy.precision
        split = self.step_of(setting, lambda count: self._split(setting, count, 1.0))
        slowed = split.pop("slowed")
        # Sums of floats differ by their order.
        slowed = slowed if slowed > 1e-9 * split["compute"] else 0.0
        sent = self.step_of(setting, lambda count: {"bytes": float(self._sent(setting.strategy, count))})
        exposed = {kind: time for kind, time in split.items() if kind not in ("compute", "optimizer") and time > 0}
        plain = sum(split.values())
        hosts = math.ceil(self.devices / hardware.devices_per_host)
        bubble = plain * hardware.kernels.straggling * math.log2(hosts)
        if self.slow_rank != 1.0:
            slow = self.step_of(setting, lambda count: self._split(setting, count, self.slow_rank))
            bubble += sum(slow.values()) - slow["slowed"] - plain
        whole = {"compute": split["compute"] - slowed, "optimizer": split["optimizer"], "bubble": bubble}
        whole["communication"] = sum(exposed.values()) + slowed
        samples = setting.samples * setting.micro_batches
        return Estimate(
            setting=setting,
            devices=self.devices,
            compute=split["compute"],
            slowed=slowed,
            exposed=exposed,
            optimizer=split["optimizer"],
            bubble=bubble,
            tokens=self.devices * samples * self.subject.context,
            flops=self.subject.flops_of(setting.samples, precision) * setting.micro_batches,
            peak_flops=self._peak(precision),
            memory=self.footprint(setting),
            capacity=self.capacity,
            bound=binding(self.spent(setting), whole),
            sent=round(sent["bytes"]),
        )

    def _peak(self, precision: str) -> float:
        """The datasheet's, in what is multiplied: float32 leaves a model of another dtype as it is."""
        device, own = self.hardware.device, self.subject.shapes.dtypes[0]
        dtype = own if precision == "float32" and own in device.ceiling else precision
        return device.peak.get(dtype) or device.ceiling[dtype]

    def spent(self, setting: Setting) -> Spent:
        """Seconds of a micro-batch's kernels by what bounds each of them."""
        key = (setting.samples, setting.strategy.precision)
        if key not in self._spent:
            self._spent[key] = spent(self.subject.work(*key), self.hardware)
        return self._spent[key]

    def unit_seconds(self, setting: Setting) -> Mapping[str, UnitSeconds]:
        """Seconds of each unit in a micro-batch, by its name."""
        strategy = setting.strategy
        key = (setting.samples, strategy.precision, strategy.recompute, strategy.recompute_every)
        if key not in self._computing:
            self._computing[key] = unit_seconds(self.subject.work(*key[:2]), self.hardware, strategy)
        return self._computing[key]

    # ---- a step

    def ops(self, strategy: Strategy, micro_batches: int) -> tuple[Op, ...]:
        """The ops of a step."""
        key = (without_recompute(strategy), micro_batches)
        if key not in self._steps:
            self._steps[key] = self.schedule(key[0]).step(micro_batches)
        return self._steps[key]

    def step_of(self, setting: Setting, of: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
        """A sum over a step's ops, from steps of few micro-batches: each one more adds the same."""
        most = min(setting.micro_batches, ALIKE)
        found = dict(of(most))
        if setting.micro_batches > most:
            before = of(most - 1)
            for name, value in found.items():
                found[name] = value + (setting.micro_batches - most) * (value - before.get(name, 0.0))
        return found

    def _sent(self, strategy: Strategy, micro_batches: int) -> int:
        return sum(op.sent for op in self.ops(strategy, micro_batches))

    def _split(self, setting: Setting, micro_batches: int, slower: float) -> dict[str, float]:
        """Where the seconds of a step of so many micro-batches go, if this rank computes so many times as long."""
        line, alone = self._timeline(setting, micro_batches, slower)
        found = split(line)
        return {**found, "slowed": max(0.0, found["compute"] - alone)}

    def _timeline(self, setting: Setting, micro_batches: int, slower: float = 1.0) -> tuple[Timeline, float]:
        """A step of so many micro-batches, and the seconds of it that it would compute with nothing beside it."""
        strategy, known = setting.strategy, dict[tuple[object, ...], float]()
        schedule = self.schedule(strategy)
        costs = costs_of(self.unit_seconds(setting), self.hardware, schedule)
        passing = collective_costs(unhindered(self.hardware), schedule)

        def cost(op: Op) -> float:
            # Collectives alike take the same, and a unit in every micro-batch.
            key = (op.kind, op.target) if op.kind in COMPUTE else (op.kind, op.bytes, op.group)
            if key not in known:
                known[key] = costs(op) * (slower if op.kind in COMPUTE else 1.0)
            return known[key]

        def weight(op: Op) -> float:
            key = ("weight", op.kind, op.bytes, op.group)
            if key not in known:
                known[key] = passing(op) / whole if (whole := cost(op)) else 0.0
            return known[key]

        ops = self.ops(strategy, micro_batches)
        contention, links = self.hardware.kernels.contention, self._links(strategy)
        alone = sum(cost(op) for op in ops if op.kind in COMPUTE and op.kind not in _UPDATES)
        return timeline(ops, cost, micro_batches, STEPS, contention, links, weight), alone

    def _links(self, strategy: Strategy) -> Links:
        """Groups within hosts use the links there, others the wires between hosts."""
        host = self.hardware.devices_per_host
        inside = {"world": self.devices <= host, "shard": strategy.shards(self.devices) <= host, "replicate": False}
        return lambda op: "within" if inside.get(op.group, False) else "between"


def split(line: Timeline) -> dict[str, float]:
    """Where the seconds of a timeline's last step go: compute, optimizer, each kind of collective that is waited for.

    What the step before sent after its update is waited for in this one.
    """
    found = {"compute": 0.0, "optimizer": 0.0}
    first = (line.steps - 1) * len(line.ops)
    for index, op in enumerate(line.ops):
        at = first + index
        if op.kind in COMPUTE:
            found["optimizer" if op.kind in _UPDATES else "compute"] += line.ends[at] - line.starts[at]
            continue
        waited = line.exposed[at - len(line.ops)] if op.phase == "update" and first else line.exposed[at]
        if waited:
            kind = "statistics" if op.stream == "statistics" else op.kind
            found[kind] = found.get(kind, 0.0) + waited
    return found


@lru_cache(4096)
def without_recompute(strategy: Strategy) -> Strategy:
    """A strategy without what does not change its schedule."""
    return replace(strategy, recompute="none", recompute_every=1)
