"""The least that a setting can take and hold, in closed form: what a search goes by before it simulates. Pure."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.memory import Memory, memory
from paceline.core.strategy import Strategy
from paceline.plan.case import Case, without_recompute
from paceline.plan.costs import OPTIMIZER_BYTES
from paceline.plan.estimate import Setting
from paceline.plan.network import seconds, spread
from paceline.plan.recomputed import recomputed_units


class Least:
    """Bounds from below for a case's settings: no step is shorter than its computing, nor than its collectives."""

    def __init__(self, case: Case) -> None:
        """Nothing is known yet."""
        self._case = case
        self._computing: dict[tuple[int, str, str, int], float] = {}
        self._moved_by: dict[Strategy, tuple[float, float, float]] = {}
        self._kept: dict[tuple[int, str, str, int], int] = {}
        self._held: dict[tuple[Strategy, int], Memory] = {}

    # ---- seconds

    def seconds(self, setting: Setting) -> float:
        """No step is shorter."""
        strategy, count = setting.strategy, setting.micro_batches
        update = self._updated(strategy) * OPTIMIZER_BYTES / self._bandwidth
        return max(count * self.computing(setting) + update, self._communicating(strategy, count))

    def computing(self, setting: Setting) -> float:
        """Seconds of a micro-batch's forward and backward, recomputing included."""
        strategy = setting.strategy
        key = (setting.samples, strategy.precision, strategy.recompute, strategy.recompute_every)
        if key not in self._computing:
            units = self._case.unit_seconds(setting).values()
            self._computing[key] = sum(unit.forward + unit.backward + unit.recompute for unit in units)
        return self._computing[key]

    def _communicating(self, strategy: Strategy, count: int) -> float:
        gather, reduce, between = self._moved(strategy)
        reductions = count if strategy.reduces_every_micro_batch else 1
        if strategy.gathers:
            # Units that lie in slots at a turn are not gathered again.
            most = 3 * max(2, strategy.prefetch + 1)
            kept = most / max(most, len(self._case.subject.shapes.units))
            gathers = 1 - kept if strategy.accumulation == "hold" else count * (2 - 2 * kept)
        else:
            gathers = 1 if strategy.stage else 0
        inside = gathers * gather + reductions * reduce
        return max(inside, between)

    def _moved(self, strategy: Strategy) -> tuple[float, float, float]:
        """Seconds of gathering all parameters, reducing all gradients, and reducing their shards over replicas."""
        key = replace(strategy, recompute="none", recompute_every=1, accumulation="auto")
        if key not in self._moved_by:
            case = self._case
            hardware, shards = case.hardware, strategy.shards(case.devices)
            numel = case.subject.shapes.numel
            item, gradient = (2, 4 if strategy.reduce_in_float32 else 2) if strategy.low else (4, 4)
            among = spread(case.devices if shards == 1 else shards, hardware.devices_per_host)
            over = spread(case.devices // shards, hardware.devices_per_host, shards)
            self._moved_by[key] = (
                seconds("all_gather", numel * item, among, hardware),
                seconds("all_reduce" if shards == 1 else "reduce_scatter", numel * gradient, among, hardware),
                seconds("all_reduce", numel * gradient / shards, over, hardware) if 1 < shards < case.devices else 0.0,
            )
        return self._moved_by[key]

    @property
    def _bandwidth(self) -> float:
        return self._case.hardware.device.bandwidth * self._case.hardware.kernels.memory_efficiency

    def _updated(self, strategy: Strategy) -> float:
        return self._case.subject.shapes.numel / strategy.shards(self._case.devices)

    # ---- bytes

    def bytes(self, setting: Setting) -> int:
        """No peak is lower: states and buffers of the schedule, and what the forward leaves for the backward."""
        return self.states(setting) + self._activations(setting)

    def states(self, setting: Setting) -> int:
        """What is held whatever the model computes, which asks for no trace of it."""
        strategy = setting.strategy
        schedule = self._case.schedule(strategy)
        held = (without_recompute(strategy), min(setting.micro_batches, 2))
        if held not in self._held:
            self._held[held] = memory(schedule, held[1])
        states = self._held[held]
        own = 0 if schedule.copies_gradients else states.gradients
        return states.total - own + self._case.hardware.framework

    def _activations(self, setting: Setting) -> int:
        strategy = setting.strategy
        key = (setting.samples, strategy.precision, strategy.recompute, strategy.recompute_every)
        if key not in self._kept:
            work = self._case.subject.work(*key[:2])
            again = recomputed_units([unit.unit for unit in work.units], strategy)
            few = "kept_attention" if strategy.recompute == "keep_attention" else "kept_input"
            self._kept[key] = sum(getattr(u, few) if u.unit in again else u.kept for u in work.units)
        return self._kept[key]
