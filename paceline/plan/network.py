"""Seconds of a collective over so many ranks on so many hosts, in closed forms. Pure: no loop over ranks.

With rings through all ranks, as NCCL lays them, one for each device of a host, every link within a host carries
(n - 1) / n of the buffer once for a gather or a reduce-scatter, and a host's wires together (h - 1) / h of it, for n
ranks on h hosts: a host takes in what it does not hold (Thakur et al. 2005; nccl-tests, PERFORMANCE.md). The slower of
the two bounds the bytes. Beside them each of the ring's steps takes a latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from paceline.plan.hardware import Hardware, Rates

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "reduce", "broadcast", "barrier", "point_to_point"]


@dataclass(frozen=True)
class Spread:
    """Where the ranks of a group are.

    Attributes:
        within: Ranks of the group on each of its hosts.
        hosts: Hosts that it spans.
    """

    within: int
    hosts: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.within * self.hosts


def unhindered(hardware: Hardware) -> Hardware:
    """With wires between hosts that are no slower than the links within.

    A collective then takes as long as it is in computing's way: a device is held up by the bytes that it copies and
    adds up, which slow wires make no more.
    """
    wires = replace(hardware.between, bandwidth=max(hardware.between.bandwidth, hardware.within.bandwidth))
    return replace(hardware, between=wires)


def spread(ranks: int, devices_per_host: int, stride: int = 1) -> Spread:
    """Where `ranks` ranks are of which each is `stride` from the next, when hosts are filled one after another.

    A group that does not fill its last host is taken to be spread evenly: rounded up to whole hosts.
    """
    within = max(1, min(ranks, devices_per_host // stride))
    return Spread(within, math.ceil(ranks / within))


def measured_rates(collective: Collective | str, group: Spread, hardware: Hardware) -> Rates | None:
    """What was measured of a collective between so many ranks of one host; None where nothing was."""
    return hardware.measured.get(f"{collective} {group.ranks}") if group.hosts == 1 else None


def seconds(collective: Collective | str, size: float, group: Spread, hardware: Hardware) -> float:
    """Seconds of one collective while nothing else uses the links.

    Args:
        collective: Its name, as ops have it.
        size: Bytes of the whole buffer: what a gather ends with, what a reduction starts with.
        group: Where its ranks are.
        hardware: Gives the links.
    """
    n, hosts = group.ranks, group.hosts
    if n <= 1:
        return 0.0
    if (measured := measured_rates(collective, group, hardware)) is not None:
        return measured.seconds(0.0, size)
    within, between = hardware.within, hardware.between
    if collective == "point_to_point":
        link = between if hosts > 1 else within
        return link.latency + size / link.bandwidth
    inside = size * (n - 1) / n / within.bandwidth if group.within > 1 else 0.0
    outside = size * (hosts - 1) / hosts / (group.within * between.bandwidth) if hosts > 1 else 0.0
    # What a broadcast or reduction moves, the other way of links stands idle; a barrier moves next to nothing.
    moved = 0.0 if collective == "barrier" else max(inside, outside)
    ring = (n - hosts) * within.latency + (hosts * between.latency if hosts > 1 else 0.0)
    tree = (group.within - 1) * within.latency + math.ceil(math.log2(hosts)) * between.latency
    if collective in ("all_gather", "reduce_scatter"):
        return moved + ring
    if collective == "all_reduce":
        # Both halves; small ones go up and down a tree instead (Sanders et al. 2009).
        return 2 * (moved + min(ring, tree))
    return moved + min(ring, tree)
