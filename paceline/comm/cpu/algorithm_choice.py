"""Which algorithm a transport runs each collective by, from what its links were measured to cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from paceline.comm.cpu.link_costs import Measured, measure_links
from paceline.comm.cpu.sums import accumulation_dtype
from paceline.core.collectives.algorithms import BANDWIDTH_OPTIMAL, REDUCTIONS
from paceline.core.collectives.choice import Choice, Topology, choose


class AlgorithmChoice:
    """The choice for the collectives of one transport, which each call is given."""

    def __init__(self, between_hosts: bool, has_codec: bool) -> None:
        """Knows no link's cost yet.

        Args:
            between_hosts: Whether ranks are connected by sockets.
            has_codec: Whether what fp32 sums send there is encoded.
        """
        self._between_hosts, self._has_codec = between_hosts, has_codec
        self._topology: Topology | None = None

    def measure(self, transport: Measured) -> Topology:
        """What links cost. A collective call the first time."""
        if self._topology is None:
            self._topology = measure_links(transport)
        return self._topology

    def why(self, transport: Measured, collective: str, size: int, bandwidth_optimal: bool = False) -> Choice:
        """See `CpuTransport.why`. A collective call the first time."""
        return choose(collective, size, self.measure(transport), bandwidth_optimal)

    def of(self, transport: Measured, collective: str, buffer: Tensor) -> str:
        """The collective with the algorithm to run it by.

        Without a name it is the fastest of those that move the fewest bytes. But not inside a host, where the default
        adds in the order of the ranks and makes a sum the same to the bit wherever a buffer is cut; nor for low
        precision, where the default rounds a sum only once.
        """
        name, _, algorithm = collective.partition("/")
        algorithm, at, root = algorithm.partition("@")
        if not algorithm and self.encodes(collective, buffer) and name in BANDWIDTH_OPTIMAL:
            # In one hop between hosts, so that nothing is rounded twice.
            return f"{name}/hierarchical" if transport.ranks_per_host > 1 else collective
        if algorithm == "auto":
            return f"{name}/{self.why(transport, name, buffer.nbytes).algorithm}{at}{root}"
        world_size = len(transport.hosts)
        if algorithm or not self._between_hosts or name not in BANDWIDTH_OPTIMAL or buffer.numel() % world_size:
            return collective
        if name in REDUCTIONS and accumulation_dtype(buffer.dtype) != buffer.dtype:
            return collective
        return f"{name}/{self.why(transport, name, buffer.nbytes, bandwidth_optimal=True).algorithm}"

    def encodes(self, collective: str, buffer: Tensor) -> bool:
        """Whether what a collective sends between hosts is encoded."""
        sums = collective.partition("/")[0] in REDUCTIONS
        return self._has_codec and self._between_hosts and sums and buffer.dtype == torch.float32


def ranks_per_host(hosts: Sequence[str]) -> int:
    """Ranks on each host, if they are as many on each and neighbours; else 0.

    Args:
        hosts: Of each rank.
    """
    each = [len(list(group)) for _, group in groupby(hosts)]
    return each[0] if len(set(each)) == 1 and len(each) == len(set(hosts)) else 0
