"""What `paceline bench comm --profile` measured between ranks of a host, in place of a formula of its links. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.comm.profile import Cost, HardwareProfile
from paceline.core.errors import UserError
from paceline.plan.hardware import Hardware, Rates

TYPICAL = 2**22
"""Bytes of a buffer by which algorithms are compared: between the buckets of small models and of large ones."""


def with_collectives(hardware: Hardware, profile: HardwareProfile, devices: int, path: str) -> Hardware:
    """Hardware whose collectives within a host take what was measured of the fastest algorithm.

    Sums of float32 are taken where they were measured, as gradients are reduced in that. Groups of as many ranks as
    were measured know of it; others go by the links, as before.

    Args:
        hardware: Of any source.
        profile: Read from a file.
        devices: Of the run.
        path: Of the file.

    Raises:
        UserError: No group of the run has as many ranks on one host as were measured.
    """
    fastest: dict[str, Cost] = {}
    for cost in _in_float32_if_any(profile.costs):
        key = f"{cost.collective} {cost.ranks}"
        if key not in fastest or cost.fit.seconds(TYPICAL) < fastest[key].fit.seconds(TYPICAL):
            fastest[key] = cost
    most = min(devices, hardware.devices_per_host)
    ranks = {cost.ranks for cost in fastest.values()}
    if not any(1 < each <= most and devices % each == 0 for each in ranks):
        raise UserError(
            f"--collectives {path}: measured between {', '.join(map(str, sorted(ranks))) or 'no'} ranks of a host, and "
            f"no group of {devices} devices, {most} on a host, has as many: measure with paceline bench comm --ranks "
            f"{most} --profile FILE"
        )
    rates = {key: Rates(fixed=cost.fit.alpha, per_byte=cost.fit.beta) for key, cost in fastest.items()}
    return replace(hardware, measured={**hardware.measured, **rates})


def _in_float32_if_any(costs: Iterable[Cost]) -> list[Cost]:
    listed = list(costs)
    wide = {(cost.collective, cost.ranks) for cost in listed if cost.dtype == "float32"}
    return [cost for cost in listed if cost.dtype == "float32" or (cost.collective, cost.ranks) not in wide]
