"""Which algorithm takes least time, from what a message and a byte cost. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.comm.algorithms import ALGORITHMS, HIERARCHICAL, LEAST, find_plan
from paceline.comm.plan import Plan, Round, fuses, overwrites


@dataclass(frozen=True)
class Link:
    """What moving data between two ranks costs."""

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
    near: Link | None
    """Between ranks of one host; None where no host has two."""
    far: Link | None
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
            for name, link in (("inside a host", self.topology.near), ("between hosts", self.topology.far))
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


def choose(collective: str, size: int, topology: Topology, least: bool = False) -> Choice:
    """Compares the algorithms of a collective by their predicted times.

    Args:
        collective: Such as "all_reduce".
        size: Bytes of the buffer.
        topology: Ranks and links.
        least: Only those that move the fewest bytes, which is what a schedule counts on.

    Raises:
        ValueError: There is no such collective.
    """
    find_plan(collective)
    names = list(ALGORITHMS[collective])
    if topology.ranks_per_host > 1 and topology.far is not None and collective in HIERARCHICAL:
        names.append("hierarchical")
    if least:
        names = [name for name in names if name in LEAST[collective]]
    costs = {
        name: predicted(find_plan(f"{collective}/{name}", topology.ranks_per_host), size, topology) for name in names
    }
    return Choice(collective, size, tuple(sorted(costs.items(), key=lambda item: item[1])), topology)


def predicted(plan: Plan, size: int, topology: Topology) -> float:
    """Seconds of a plan: in each round, what the busiest rank and the busiest host's wire take.

    Between hosts a rank handles its messages one after another, alpha each, and all ranks of a host share the wire,
    each way for itself. Inside a host alpha is what meeting the peers of a round takes. A byte there costs the rank
    that reads it beta, and once more where it must be put aside first; two rounds may be done at once (`fuses`).

    Args:
        plan: The plan.
        size: Bytes of the buffer.
        topology: Ranks and links.
    """
    ranks = len(topology.hosts)
    per_rank = [plan(rank, ranks, size) for rank in range(ranks)]
    turns = list(zip(*per_rank, strict=True))
    total = sum(_round_seconds(turn, topology) for turn in turns)
    if topology.far is None and topology.near is not None:
        at_once = [
            all(fuses(a, b, set(range(ranks)) - {rank}) for rank, (a, b) in enumerate(zip(first, second, strict=True)))
            for first, second in pairwise(turns)
        ]
        total -= topology.near.alpha * sum(at_once)
    return total


def _round_seconds(turns: Sequence[Round], topology: Topology) -> float:
    hosts, near, far = topology.hosts, topology.near, topology.far
    slowest = 0.0
    out: dict[str, int] = defaultdict(int)
    into: dict[str, int] = defaultdict(int)
    for rank, turn in enumerate(turns):
        seconds = 0.0
        reads = [part for part in turn.receives if hosts[part.peer] == hosts[rank]]
        if reads and near is not None:
            size = sum(part.stop - part.start for part in reads)
            seconds += near.alpha + near.beta * (2 * size if overwrites(turn) else size)
        takes = [part for part in turn.receives if hosts[part.peer] != hosts[rank]]
        gives = [part for part in turn.sends if hosts[part.peer] != hosts[rank]]
        if far is not None:
            seconds += far.alpha * max(len(takes), len(gives))
        into[hosts[rank]] += sum(part.stop - part.start for part in takes)
        out[hosts[rank]] += sum(part.stop - part.start for part in gives)
        slowest = max(slowest, seconds)
    wire = max([0, *into.values(), *out.values()])
    return slowest + (far.beta * wire if far is not None else 0.0)
