"""The fastest setting of each strategy that a device's memory holds, and the fastest of all. Pure.

Of each strategy (stage, groups) every micro-batch, recomputation and way to accumulate has a bound in closed form: no
step is shorter than its computing, nor than its collectives. Settings are simulated in the order of their bounds until
the best so far is shorter than all bounds that are left, so what is found is the best by simulation, too, unless
`MOST_TRIED` cuts it short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from paceline.core.strategy import Strategy
from paceline.core.uncollected import uncollected
from paceline.plan.case import Case
from paceline.plan.choice import preferred
from paceline.plan.estimate import Estimate, Setting
from paceline.plan.least import Least

MOST_TRIED = 6
"""Settings of one strategy that are simulated at most."""
MOST_MICRO_BATCHES = 8
"""Sizes of a micro-batch that are looked at with one way to recompute."""
LARGEST_MICRO_BATCH = 4096
RECOMPUTE = (("none", 1), ("keep_attention", 2), ("keep_attention", 1), ("unit", 2), ("unit", 1))
"""What is computed again, and of which share of the blocks: more and more of it."""
BUCKETS = (25.0, 100.0, 400.0)
"""MiB of a bucket that are looked at where it matters."""
PREFETCH = (2, 4)
"""Units gathered ahead that are looked at, beside the usual one, where it matters."""
WORTH_TUNING = 0.01
"""Share of a step that has to be waited for communication for sizes of buckets and prefetching to matter."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: Of each strategy its fastest setting that fits, else that which misses by least; the fastest that fit
            first, then those that do not fit, by what they miss.
        looked_at: How many settings there were.
        simulated: How many of them were simulated.
    """

    best: tuple[Estimate, ...]
    looked_at: int
    simulated: int

    @property
    def recommended(self) -> Estimate | None:
        """The fastest that fits, or one as fast that shares less; None if nothing fits."""
        fitting = [each for each in self.best if each.fits]
        return preferred(fitting, lambda each: each.seconds, lambda each: each.setting.strategy) if fitting else None


# Hundreds of thousands of small objects are made: looking for circles among them would take a third longer.
@uncollected()
def search(
    case: Case,
    samples: int,
    *,
    precisions: Sequence[str] = ("bfloat16",),
    strategies: Iterable[Strategy] | None = None,
) -> Found:
    """Looks for the best setting of each strategy.

    Args:
        case: Model, machines, devices.
        samples: Of a step on one device.
        precisions: What may be computed in.
        strategies: Stages and groups to look at; all that there are by default.

    Raises:
        UserError: The device does not compute in that precision.
    """
    looked_at = simulated = 0
    least, room = Least(case), case.capacity
    best: list[Estimate] = []
    if strategies is None:
        strategies = [family for precision in precisions for family in families(case, precision)]
    for family in strategies:
        settings = list(_settings(case, least, family, samples))
        looked_at += len(settings)
        if family.shard and min(map(least.bytes, settings)) > room:
            # Groups hold more than all ranks do: what these miss by says enough.
            continue
        found, tried = _best(case, settings, least, room)
        simulated += tried
        if found.fits and found.communication > WORTH_TUNING * found.seconds:
            found, tried = _tuned(case, found)
            simulated += tried
            looked_at += tried
        best.append(found)
    best.sort(key=lambda each: (not each.fits, each.seconds if each.fits else -each.spare))
    return Found(tuple(best), looked_at, simulated)


def fits(case: Case, family: Strategy, samples: int) -> bool:
    """Whether any setting of a strategy fits, which takes no simulation.

    Args:
        case: Model, machines, devices.
        family: Stage, groups and precision.
        samples: Of a step on one device.
    """
    least, room = Least(case), case.capacity
    possible = [each for each in _settings(case, least, family, samples) if least.states(each) <= room]
    return any(case.footprint(each).peak <= room for each in sorted(possible, key=least.bytes))


def families(case: Case, precision: str) -> list[Strategy]:
    """Every stage over all ranks, and in groups of a host's devices and of some hosts."""
    chosen: dict[str, Any] = {"precision": precision}
    if case.devices == 1:
        return [Strategy(zero=0, **chosen)]
    stages: list[Any] = [1, 2, 3]
    shards = [0, *groups(case, (1, 2, 4, 16, 64))]
    found = [Strategy(zero=stage, shard=shard, **chosen) for stage, shard in product(stages, shards)]
    return [Strategy(zero=0, **chosen), *found]


def groups(case: Case, hosts: Sequence[int]) -> list[int]:
    """Sizes of groups: the devices of about so many hosts, or where the last host is not full a part that all share."""
    devices, host = case.devices, case.hardware.devices_per_host
    # It divides a host's devices, so that no group lies on two hosts.
    sizes = [math.gcd(devices, host)] if devices > host else []
    if devices % host == 0:
        whole = devices // host
        divisors = [count for count in range(1, whole + 1) if whole % count == 0]
        sizes += [host * min(divisors, key=lambda each: abs(math.log(each / count))) for count in hosts]
    return [size for size in dict.fromkeys(sizes) if 1 < size < devices]


def micro_batches(samples: int, may_fit: Callable[[int], bool], least: int = 1) -> list[int]:
    """Sizes of a micro-batch to look at, the smallest first: some divisors of a device's samples.

    Large ones leave less to wait for and fill matmuls, so the largest that may fit is among them; the others are spread
    down to the least.

    Args:
        samples: Of a step on one device.
        may_fit: Whether a size may fit; of larger ones fewer do.
        least: What the model takes at least.
    """
    least = min(least, samples)
    divisors = [size for size in range(least, min(samples, LARGEST_MICRO_BATCH) + 1) if samples % size == 0]
    possible = [size for size in divisors if may_fit(size)] or divisors[:1]
    steps = min(len(possible), MOST_MICRO_BATCHES) - 1
    return [possible[round(index * (len(possible) - 1) / steps)] for index in range(steps + 1)] if steps else possible


def _settings(case: Case, least: Least, family: Strategy, samples: int) -> Iterator[Setting]:
    for recompute, every in RECOMPUTE:
        changed: dict[str, Any] = {"recompute": recompute, "recompute_every": every}
        strategy = replace(family, **changed)
        smallest = case.subject.least(strategy.precision)
        for size in micro_batches(samples, partial(_may_fit, case, least, strategy, samples), smallest):
            count = samples // size
            ways: list[Any] = ["auto"]
            if count > 1 and family.stage >= 2 and family.reduce_in_float32:
                ways += ["defer", "hold"] if family.gathers else ["defer"]
            for accumulation in ways:
                yield Setting(replace(strategy, accumulation=accumulation), size, count)


def _may_fit(case: Case, least: Least, strategy: Strategy, samples: int, size: int) -> bool:
    return least.bytes(Setting(strategy, size, samples // size)) <= case.capacity


def _best(case: Case, settings: Sequence[Setting], least: Least, room: int) -> tuple[Estimate, int]:
    """The fastest setting that fits, else the one that misses by least; and how many were simulated."""
    # Of those that the network binds, what computes least; of those alike, what computes nothing again, as units may
    # have nothing that would have to be; then what holds least.
    order = sorted(
        (
            least.seconds(each),
            least.computing(each) * each.micro_batches,
            each.strategy.recompute != "none",
            least.bytes(each),
            index,
        )
        for index, each in enumerate(settings)
    )
    best: Estimate | None = None
    tried = 0
    for bound, _, _, held, index in order:
        if best is not None and (best.seconds <= bound or tried >= MOST_TRIED):
            break
        if held > room or case.footprint(settings[index]).peak > room:
            continue
        tried += 1
        estimate = case.estimate(settings[index])
        if best is None or estimate.seconds < best.seconds:
            best = estimate
    if best is None:
        smallest = min(order, key=lambda each: each[3])[4]
        best, tried = case.estimate(settings[smallest]), 1
    return best, tried


def _tuned(case: Case, best: Estimate) -> tuple[Estimate, int]:
    """The best setting with other sizes of buckets, or with more gathered ahead where units are gathered one by one."""
    strategy = best.setting.strategy
    if case.devices == 1 or strategy.accumulation == "hold":
        return best, 0
    if strategy.gathers:
        others = [replace(strategy, prefetch=units) for units in PREFETCH]
    else:
        others = [replace(strategy, bucket_mb=size) for size in BUCKETS]
    tried = [case.estimate(replace(best.setting, strategy=each)) for each in others if each != strategy]
    # A hundredth is what a default is worth.
    better = [each for each in tried if each.fits and each.seconds < 0.99 * best.seconds]
    return min(better, key=lambda each: each.seconds, default=best), len(tried)
