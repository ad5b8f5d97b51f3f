"""The choice of the algorithm that takes least time, by what a message and a byte cost. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.collectives.algorithms import ALGORITHMS, BANDWIDTH_OPTIMAL, HIERARCHICAL, find_algorithm
from paceline.core.collectives.rounds import Algorithm, Round, fuses, overwrites


@dataclass(frozen=True)
class Link:
    """The cost of moving data between two ranks."""

    alpha: float
    """Seconds a message."""
    beta: float
    """Seconds a byte."""


@dataclass(frozen=True)
class Topology:
    """Where ranks are, and what moving data between them costs."""

    hosts: tuple[str, ...]
    """Of each rank."""
    ranks_per_host: int
    """Ranks on each host, if they are as many on each and neighbours; else 0."""
    intra_host: Link | None
    """Between ranks of one host; None where no host has two."""
    inter_host: Link | None
    """Between hosts, where the ranks of a host share one wire; None with one host."""


@dataclass(frozen=True)
class Choice:
    """Why one algorithm and not another."""

    collective: str
    size: int
    """Bytes."""
    costs: tuple[tuple[str, float], ...]
    """Algorithms and their predicted seconds, the fastest first."""
    topology: Topology

    @property
    def algorithm(self) -> str:
        """The fastest."""
        return self.costs[0][0]

    def __str__(self) -> str:
        """The choice and what it rests on, as a table for people."""
        links = [
            f"{name}: {1e6 * link.alpha:.1f} us a message, {1e-9 / link.beta:.2f} GB/s"
            for name, link in (("inside a host", self.topology.intra_host), ("between hosts", self.topology.inter_host))
            if link is not None
        ]
        ranks, hosts = len(self.topology.hosts), len(set(self.topology.hosts))
        lines = [f"{self.collective} of {self.size:,} bytes, {ranks} ranks on {hosts} host{'s' * (hosts > 1)}"]
        lines += [f"  measured {line}" for line in links]
        lines += [
            f"  {algorithm:<13} {1e3 * seconds:10.3f} ms" + ("  <- chosen" if index == 0 else "")
            for index, (algorithm, seconds) in enumerate(self.costs)
        ]
        return "\n".join(lines)


def choose(collective: str, size: int, topology: Topology, bandwidth_optimal: bool = False) -> Choice:
    """Compares the algorithms of a collective by their predicted times.

    Args:
        collective: Such as "all_reduce".
        size: Bytes of the buffer.
        topology: Ranks and links.
        bandwidth_optimal: Only those that move the fewest bytes, which is what a schedule counts on.

    Raises:
        ValueError: There is no such collective.
    """
    find_algorithm(collective)
    names = list(ALGORITHMS[collective])
    if topology.ranks_per_host > 1 and topology.inter_host is not None and collective in HIERARCHICAL:
        names.append("hierarchical")
    if bandwidth_optimal:
        names = [name for name in names if name in BANDWIDTH_OPTIMAL[collective]]
    costs = {
        name: predict_seconds(find_algorithm(f"{collective}/{name}", topology.ranks_per_host), size, topology)
        for name in names
    }
    return Choice(collective, size, tuple(sorted(costs.items(), key=lambda item: item[1])), topology)


def predict_seconds(algorithm: Algorithm, size: int, topology: Topology) -> float:
    """Seconds of an algorithm: in each round, what the busiest rank and the busiest host's wire take.

    Between hosts a rank handles its messages one after another, alpha each, and all ranks of a host share the wire,
    each way for itself. Inside a host alpha is what meeting the peers of a round takes. A byte there costs the rank
    that reads it beta, and once more where it must wait in scratch memory (`overwrites`). Two rounds may be done as
    one (`fuses`).

    Args:
        algorithm: The algorithm.
        size: Bytes of the buffer.
        topology: Ranks and links.
    """
    ranks = len(topology.hosts)
    per_rank = [algorithm(rank, ranks, size) for rank in range(ranks)]
    rounds = list(zip(*per_rank, strict=True))
    total = sum(_round_seconds(round_, topology) for round_ in rounds)
    if topology.inter_host is None and topology.intra_host is not None:
        at_once = [
            all(fuses(a, b, set(range(ranks)) - {rank}) for rank, (a, b) in enumerate(zip(first, second, strict=True)))
            for first, second in pairwise(rounds)
        ]
        total -= topology.intra_host.alpha * sum(at_once)
    return total


def _round_seconds(rounds: Sequence[Round], topology: Topology) -> float:
    hosts, intra, inter = topology.hosts, topology.intra_host, topology.inter_host
    slowest = 0.0
    out: dict[str, int] = defaultdict(int)
    into: dict[str, int] = defaultdict(int)
    for rank, round_ in enumerate(rounds):
        seconds = 0.0
        reads = [transfer for transfer in round_.receives if hosts[transfer.peer] == hosts[rank]]
        if reads and intra is not None:
            size = sum(transfer.numel for transfer in reads)
            seconds += intra.alpha + intra.beta * (2 * size if overwrites(round_) else size)
        takes = [transfer for transfer in round_.receives if hosts[transfer.peer] != hosts[rank]]
        gives = [transfer for transfer in round_.sends if hosts[transfer.peer] != hosts[rank]]
        if inter is not None:
            seconds += inter.alpha * max(len(takes), len(gives))
        into[hosts[rank]] += sum(transfer.numel for transfer in takes)
        out[hosts[rank]] += sum(transfer.numel for transfer in gives)
        slowest = max(slowest, seconds)
    wire = max([0, *into.values(), *out.values()])
    return slowest + (inter.beta * wire if inter is not None else 0.0)
