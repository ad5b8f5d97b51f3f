"""The memory of a rank over the time of a simulated step. Pure."""

from __future__ import annotations

from paceline.core.events import Event
from paceline.core.memory_over_time import Moments, memory_over_time
from paceline.core.simulate import simulate
from paceline.plan.case import ALIKE, Case
from paceline.plan.costs import step_costs
from paceline.plan.estimate import Setting
from paceline.plan.recomputed import recomputed_units


def simulated_memory(case: Case, setting: Setting) -> Moments:
    """Returns the bytes that a rank holds from each second on, without gradients that are yet to be copied in.

    Args:
        case: Model, machines, devices.
        setting: Of whose step at most `ALIKE` micro-batches are followed, as the others are like them.
    """
    strategy = setting.strategy
    schedule, work = case.schedule(strategy), case.subject.work(setting.samples, strategy.precision)
    again = recomputed_units([unit.unit for unit in work.units], strategy)
    few = "kept_attention" if strategy.recompute == "keep_attention" else "kept_input"
    kept = {unit.unit: int(getattr(unit, few)) if unit.unit in again else unit.kept for unit in work.units}
    beside = {}
    for unit in work.units:
        beside["forward", unit.unit] = unit.forward_peak
        beside["backward", unit.unit] = unit.backward_peak + unit.kept - kept[unit.unit]

    def during(event: Event) -> int:
        return beside.get((event.kind, event.target), 0)

    count = min(setting.micro_batches, ALIKE)
    events = simulate(schedule, step_costs(work, case.hardware, schedule), count)
    return memory_over_time(events, case.footprint(setting).steady, kept, during)
