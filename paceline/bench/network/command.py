"""`paceline bench network`: all-reduces and training steps between hosts with slow links, made on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from paceline.bench.network.hosts import MOST_HOSTS, Hosts, NetworkUnavailable
from paceline.bench.network.jobs import JobFailed, Link, measure_link, run_job
from paceline.bench.network.rank import Job
from paceline.bench.network.rows import NetworkRow, make_row, table
from paceline.bench.network.turns import Timed
from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.core.errors import UserError
from paceline.measuring.results import write_json

Experiment = Literal["all-reduce", "systems", "buckets", "stages", "wire", "hierarchical"]

DRAWN = ("systems", "buckets")
"""Experiments that the picture shows."""

FAILED, SKIPPED = 1, 3
"""Exit statuses."""


@dataclass(frozen=True)
class NetworkBench:
    """What a slow network costs, and what hides it: hosts made on this machine, with links of a set rate.

    The hosts are network namespaces, joined by veth and limited by tc, in which torchrun's agents start the ranks.
    They need root and Linux's iproute2, touch no interface that there is, and vanish with this command.

    Every figure stands next to the least time that the wire allows, by the rate that plain TCP sockets reach on it.

    Exit status: 0; 1 if an experiment failed; 3 if this machine cannot make such hosts and nothing was measured.
    """

    hosts: int = 2
    """Number of hosts; more than two are joined by a switch."""
    ranks_per_host: int = 1
    """Ranks on each host; the experiment "hierarchical" takes 2 at least."""
    gbit: float = 1.0
    """Gbit/s that a host's link carries each way."""
    experiments: tuple[Experiment, ...] = get_args(Experiment)
    """all-reduce: by size, against Gloo's. systems: those that data parallelism went through, and torch's DDP, on a
    model that computes for as long as its gradients are on the wire. buckets: their size, on the same model. stages:
    what is sharded, on the same model, against DDP. wire: gradients sent in full, as bf16 or as int8. hierarchical:
    inside the hosts and then between them, against flat."""
    rounds: int = 5
    """Rounds; in each, every system runs in turn."""
    json: JsonFile = ""
    """Where to write machine, versions, command, links and rows; - prints them, and all else goes to stderr."""
    plot: Annotated[str, Value("FILE")] = ""
    """Where to draw the steps of systems and buckets: a .svg or a .png."""


def main(options: NetworkBench) -> int:
    """Runs the experiments one after another, each on fresh hosts; prints its tables and writes its files.

    Returns:
        The exit status.

    Raises:
        UserError: An option makes no sense.
    """
    check(options)
    rows: list[NetworkRow] = []
    links: dict[str, Link] = {}
    failures: list[dict[str, str]] = []
    for experiment in options.experiments:
        try:
            links[experiment], found = run_experiment(experiment, options)
        except NetworkUnavailable as error:
            print(f"paceline bench network: skipped, nothing was measured: it {error}", file=sys.stderr)
            return SKIPPED
        except JobFailed as error:
            show(f"{error}")
            failures.append({"experiment": experiment, "reason": str(error)})
        else:
            print(f"{table(found)}\n", flush=True)
            rows += found
        if options.json:  # each time, so that a run that is cut short leaves what it has
            extra: dict[str, Any] = {"links": {name: asdict(link) for name, link in links.items()}}
            if failures:
                extra["failures"] = failures
            write_json(options.json, rows, extra)
        if options.plot and any(row.experiment in DRAWN for row in rows):
            from paceline.bench.network.picture import draw

            draw(rows, Path(options.plot))
    return FAILED if failures else 0


def check(options: NetworkBench) -> None:
    """Sees that the options make sense.

    Raises:
        UserError: They do not.
    """
    for name, value, least, most in (
        ("hosts", options.hosts, 2, MOST_HOSTS),
        ("ranks-per-host", options.ranks_per_host, 1, 64),
        ("gbit", options.gbit, 0.01, 1000),
        ("rounds", options.rounds, 2, 10_000),
    ):
        if not least <= value <= most:
            raise UserError(f"--{name}: expected {least} to {most}, got {value}")
    for file in (options.json, options.plot):
        if not Path(file).parent.is_dir():
            raise UserError(f"{file}: there is no folder {Path(file).parent} to write it to")
    if options.plot:
        if Path(options.plot).suffix not in (".png", ".svg"):
            raise UserError(f"--plot: expected a name that ends with .png or .svg, got {options.plot}")
        if not set(DRAWN) & set(options.experiments):
            raise UserError(f"--plot shows {' and '.join(DRAWN)}: add one of them to --experiments")
        if importlib.util.find_spec("matplotlib") is None:
            raise UserError("--plot needs matplotlib: pip install 'paceline[plot]'")


def run_experiment(experiment: Experiment, options: NetworkBench) -> tuple[Link, list[NetworkRow]]:
    """Runs one experiment on hosts of its own; returns what their links carry, and the rows.

    Raises:
        NetworkUnavailable: This machine cannot make such hosts.
        JobFailed: A program on a host failed.
    """
    ranks_per_host = max(2, options.ranks_per_host) if experiment == "hierarchical" else options.ranks_per_host
    with Hosts(options.hosts, options.gbit) as hosts:
        link = measure_link(hosts, options.gbit)
        gbit = link.rate * 8e-9
        short = "" if gbit > 0.9 * options.gbit else "; this machine is too slow or too busy for more"
        print(
            f"{experiment}: a link of {options.gbit:g} Gbit/s carries {gbit:.3f} Gbit/s of TCP each way, round trip "
            f"{link.round_trip * 1e3:.3f} ms{short}",
            flush=True,
        )
        job = Job(experiment, options.hosts, ranks_per_host, link.rate, options.rounds)
        found = run_job(hosts, job, lambda words: show(f"{experiment}: {words}"))
    hosts_and_links = (options.hosts, ranks_per_host, link.rate, len(os.sched_getaffinity(0)))
    return link, [make_row(experiment, Timed(**one), *hosts_and_links) for one in found]


def show(words: str) -> None:
    """Tells how far the command is."""
    print(f"paceline bench network: {words}", file=sys.stderr, flush=True)
