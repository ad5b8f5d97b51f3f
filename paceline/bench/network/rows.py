"""What the experiments found, next to the bounds that no system can beat, as rows and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.network.turns import Timed
from paceline.measuring.results import half_spread


def wire_seconds(hosts: int, size: float, rate: float) -> float:
    """The least time in which `hosts` can all-reduce `size` bytes: each must send and receive 2(N-1)/N of them.

    Patarasuk and Yuan 2009. The ranks of a host count as one, as they can add up before they send.

    Args:
        hosts: Number of hosts N.
        size: Bytes of the buffer.
        rate: Bytes a second that a host's link carries each way.
    """
    return 2 * (hosts - 1) / hosts * size / rate


@dataclass(frozen=True)
class NetworkRow:
    """One system in one case of one experiment."""

    experiment: str
    case: str
    system: str
    setting: str
    hosts: int
    ranks_per_host: int
    gbit: float
    """Gbit/s of TCP that a link was measured to carry each way."""
    median_ms: float
    """Median over rounds of one all-reduce or training step, of the slowest rank."""
    spread_ms: float
    """Half the distance between the quartiles of that."""
    compute_ms: float
    """Median of computing alone in the same rounds; 0 where nothing is computed."""
    wire_ms: float
    """The least that the wire allows; see `wire_seconds`."""
    ratio: float
    """Median over rounds of the time to the larger of the round's computing alone and the wire's least."""
    ratio_spread: float
    """Half the distance between the quartiles of that."""
    sent_bytes: float
    """Bytes that the busiest host sent in one, headers included."""
    cores_ms: float
    """Processor time of all ranks, looking for messages included, over the cores of this machine, which they share."""

    @property
    def where(self) -> str:
        """The hosts and their links, in words."""
        ranks = f"{self.ranks_per_host} rank{'s' if self.ranks_per_host > 1 else ''}"
        return f"{self.hosts} hosts with {ranks} each, {self.gbit:.2f} Gbit/s"


def make_row(experiment: str, timed: Timed, hosts: int, ranks_per_host: int, rate: float, cores: int) -> NetworkRow:
    """A row of what was timed, over links that carry `rate` bytes a second each way, by ranks that share `cores`."""
    wire = wire_seconds(hosts, timed.size, rate)
    compute = timed.compute or (0.0,) * len(timed.seconds)
    ratios = [mine / max(alone, wire) for mine, alone in zip(timed.seconds, compute, strict=True)]
    return NetworkRow(
        experiment,
        timed.case,
        timed.system,
        timed.setting,
        hosts,
        ranks_per_host,
        rate * 8e-9,
        statistics.median(timed.seconds) * 1e3,
        half_spread(timed.seconds) * 1e3,
        statistics.median(compute) * 1e3,
        wire * 1e3,
        statistics.median(ratios),
        half_spread(ratios),
        timed.sent,
        timed.processor / cores * 1e3,
    )


def table(rows: Sequence[NetworkRow]) -> str:
    """The rows of one experiment as an aligned table, a part for each case."""
    first = rows[0]
    bound = "the larger of computing alone and the wire's least" if first.compute_ms else "the wire's least"
    names = {row: f"  {row.system}: {row.setting}" for row in rows}
    width = max(map(len, (*names.values(), *(row.case for row in rows))))
    columns = f"{'ms':>9} {'±':>7} {'compute':>8} {'wire':>8} {'cores':>8} {'ratio':>7} {'±':>6} {'sent MB':>8}"
    lines = [
        f"{first.experiment}, {first.where}; ratio to {bound}, ± half the quartile distance",
        " " * width + columns,
    ]
    for case in dict.fromkeys(row.case for row in rows):
        lines.append(case)
        lines += [
            f"{names[row]:<{width}}{row.median_ms:9.2f} {row.spread_ms:7.2f} {row.compute_ms:8.2f} {row.wire_ms:8.2f} "
            f"{row.cores_ms:8.2f} {row.ratio:7.3f} {row.ratio_spread:6.3f} {row.sent_bytes / 1e6:8.2f}"
            for row in rows
            if row.case == case
        ]
    return "\n".join(lines)
