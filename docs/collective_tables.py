"""The tables of docs/collectives.md: what each algorithm costs by its rounds, and what it took when measured."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from algorithm_runs import run

from paceline.core.collectives.algorithms import ALGORITHMS, HIERARCHICAL, find_algorithm
from paceline.core.collectives.choice import Link, Topology, predict_seconds
from paceline.core.collectives.rounds import Algorithm, alpha_beta_seconds, traffic_of


@dataclass(frozen=True)
class Formula:
    """The cost of an algorithm in N; in a term a space multiplies.

    L is the logarithm of N to base 2, rounded up, F the same rounded down; X is 1 where N is no power of two, else 0.
    """

    rounds: str
    most: str
    """Buffers (for a barrier, tokens) that the busiest rank sends, or receives, in all rounds."""
    wire: str = ""
    """Buffers that the rounds' busiest ranks move one after another, where that is more."""
    least: int = 2
    """Ranks from which on it holds."""

    def time(self, size: str) -> str:
        """Alpha-beta time of a buffer of `size` bytes."""
        return f"{times(self.rounds, 'α')} + {times(self.wire or self.most, f'{size} β')}"

    @property
    def terms(self) -> tuple[str, str, str]:
        """What `count` counts."""
        return self.rounds, self.most, self.wire or self.most


SHARE = "(N-1)/N"
FORMULAS = {
    ("broadcast/server", "reduce/server"): Formula("1", "N-1"),
    ("broadcast/tree", "reduce/tree"): Formula("L", "L"),
    ("broadcast/ring", "reduce/ring"): Formula("N", f"2 {SHARE}"),
    ("scatter/server", "gather/server"): Formula("1", SHARE),
    ("scatter/tree", "gather/tree"): Formula("L", SHARE),
    ("all_gather/direct", "reduce_scatter/direct"): Formula("1", SHARE),
    ("all_gather/ring", "reduce_scatter/ring"): Formula("N-1", SHARE),
    ("all_gather/doubling", "reduce_scatter/halving"): Formula("L", SHARE),
    ("all_gather/server", "reduce_scatter/server"): Formula("2", "N-1", f"(N+1) {SHARE}"),
    ("all_gather/hierarchical", "reduce_scatter/hierarchical"): Formula("2", SHARE),
    ("all_reduce/direct",): Formula("2", f"2 {SHARE}"),
    ("all_reduce/ring",): Formula("2 (N-1)", f"2 {SHARE}"),
    ("all_reduce/halving",): Formula("2 L", f"2 {SHARE}"),
    ("all_reduce/hierarchical",): Formula("4", f"2 {SHARE}"),
    ("all_reduce/doubling",): Formula("F+2 X", "F+X", "F+2 X"),
    ("all_reduce/tree",): Formula("2 L", "L", "2 L"),
    ("all_reduce/server",): Formula("2", "N-1", "2 (N-1)"),
    ("all_to_all/direct",): Formula("1", SHARE),
    ("all_to_all/pairwise",): Formula("N", SHARE, "1", least=3),
    ("barrier/doubling",): Formula("L", "L"),
    ("barrier/direct",): Formula("1", "N-1"),
    ("barrier/tree",): Formula("2 L", "L", "2 L"),
    ("barrier/server",): Formula("2", "N-1", "2 (N-1)"),
}
"""By algorithm. What runs backwards, as a reduce does, costs what it costs forwards."""

CHECKED = (2, 3, 4, 5, 6, 7, 8, 12, 16, 17)
"""Numbers of ranks for which formulas are compared with algorithms."""

TEXTBOOK = (0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3)
"""Of eight ranks, to be reduced to their sum."""


def formula_of(name: str) -> Formula:
    """The formula of "all_reduce/ring"."""
    (found,) = (formula for names, formula in FORMULAS.items() if name in names)
    return found


def value(term: str, ranks: int) -> Fraction:
    """A term of a formula for so many ranks."""
    floor, ceiling = ranks.bit_length() - 1, (ranks - 1).bit_length()
    letters = {"N": Fraction(ranks), "F": floor, "L": ceiling, "X": ceiling - floor}
    return Fraction(eval(term.replace(" ", "*"), {"__builtins__": {}}, letters))


def times(term: str, what: str) -> str:
    """The term times something, as one writes it."""
    outside = re.sub(r"\(.*?\)", "", term)
    return what if term == "1" else f"({term}) {what}" if set("+-") & set(outside) else f"{term} {what}"


def check() -> None:
    """Compares every formula with what its algorithm counts.

    Raises:
        ValueError: A formula is wrong, or one is missing.
    """
    names = {f"{collective}/{name}" for collective, known in ALGORITHMS.items() for name in known}
    names |= {f"{collective}/hierarchical" for collective in HIERARCHICAL}
    written = [name for group in FORMULAS for name in group]
    if sorted(written) != sorted(names):
        raise ValueError(f"formulas and algorithms differ: {names.symmetric_difference(written)}")
    for name in written:
        formula = formula_of(name)
        for ranks in (ranks for ranks in CHECKED if ranks >= formula.least):
            for local in _divisors(ranks) if name.endswith("hierarchical") else (0,):
                counted = count(find_algorithm(name, local), ranks, 1 if name.startswith("barrier") else 6 * ranks)
                if list(counted) != [value(term, ranks) for term in formula.terms]:
                    raise ValueError(f"{name}, {ranks} ranks: {formula} is not what the algorithm counts, {counted}")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def count(algorithm: Algorithm, ranks: int, size: int) -> tuple[int, Fraction, Fraction]:
    """Rounds, and the two amounts of `Formula`, in buffers."""
    moved = [max(traffic_of(algorithm, rank, ranks, size)) for rank in range(ranks)]
    wire = alpha_beta_seconds(algorithm, ranks, size, bandwidth=1.0)
    return len(algorithm(0, ranks, size)), Fraction(max(moved), size), Fraction(wire) / size


def tables() -> dict[str, str]:
    """What the algorithms give, by the name that each table has in the page."""
    return {"formulas": formulas(), "numbers": numbers()}


def formulas() -> str:
    """A line for each algorithm and what is it backwards."""
    check()
    lines = ["| collective | algorithm | rounds | bytes a rank | time |", "|---|---|---|---|---|"]
    for names, formula in FORMULAS.items():
        collectives, algorithms = (dict.fromkeys(part) for part in zip(*(n.split("/") for n in names), strict=True))
        token = names[0].startswith("barrier")
        most = times(formula.most, "token" if formula.most == "1" else "tokens") if token else times(formula.most, "M")
        time = times(formula.rounds, "α") if token else formula.time("M")
        time += f" (N ≥ {formula.least})" if formula.least > 2 else ""
        lines.append(f"| {', '.join(collectives)} | {', '.join(algorithms)} | {formula.rounds} | {most} | {time} |")
    return "\n".join(lines)


# ---- the textbook's numbers


def numbers() -> str:
    """The textbook's worked numbers, as the algorithms give them."""
    mega = 1_000_000
    ring, tree, server = map(find_algorithm, ("all_reduce/ring", "broadcast/tree", "broadcast/server"))
    lines = ["| | from the algorithm |", "|---|---|"]
    for ranks in (10, 1000):
        sent = Fraction(traffic_of(ring, 0, ranks, mega).sent, mega)
        lines.append(f"| ring all-reduce, {ranks} ranks: a rank sends | {float(sent):g} M |")
    for name, algorithm in (("server", server), ("tree", tree)):
        rounds, took = len(algorithm(0, 8, 5 * mega)), alpha_beta_seconds(algorithm, 8, 5 * mega, bandwidth=mega)
        lines.append(
            f"| {name} broadcast of 5 MB at 1 MB/s to 8 ranks | {took:g} s, {rounds} round{'s' * (rounds > 1)} |"
        )
    states = run(find_algorithm("reduce/tree"), [[Decimal(str(number))] for number in TEXTBOOK], lambda a, b: a + b)
    given = ", ".join(map(str, TEXTBOOK))
    lines.append(f"| tree reduce of {given} | {states[-1][0][0]}, {len(states) - 1} rounds |")
    return "\n".join(lines)


# ---- measured

SIZES = (64 << 10, 1 << 20, 25 << 20)
"""Bytes for which times are shown, or those next to them that were measured."""


def measured(results: dict[str, Any]) -> str:
    """Times of each algorithm beside its formula, then of each library's fastest."""
    parts = []
    for ranks, dtype in dict.fromkeys((row["ranks"], row["dtype"]) for row in results["rows"]):
        rows = [row for row in results["rows"] if (row["ranks"], row["dtype"]) == (ranks, dtype)]
        copies = [copy for copy in results.get("copies", []) if copy["ranks"] == ranks]
        known = sorted({row["bytes"] for row in rows if row["bytes"]})
        sizes = list(dict.fromkeys(min(known, key=lambda size: abs(math.log(size / wanted))) for wanted in SIZES))
        said = " / ".join(map(size_text, sizes))
        machine = results["machine"]
        parts.append(
            f"{ranks} ranks, {dtype}; {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, "
            f"{results['rounds']} rounds. Milliseconds for {said}:"
        )
        parts += [_by_algorithm(rows, ranks, sizes), _by_library(rows, copies, sizes)]
    return "\n\n".join(parts)


def _by_algorithm(rows: Sequence[dict[str, Any]], ranks: int, sizes: Sequence[int]) -> str:
    own = [row for row in rows if row["algorithm"] in ALGORITHMS[row["op"]]]
    transports = list(dict.fromkeys(row["transport"] for row in own))
    heads = ["collective", "algorithm", "time", f"with {ranks} ranks", *transports]
    lines = ["| " + " | ".join(heads) + " |", "|---|---|---|---|" + "---:|" * len(transports)]
    for op, algorithm in dict.fromkeys((row["op"], row["algorithm"]) for row in own):
        name = f"{op}/{algorithm}"
        rounds, most, wire = count(find_algorithm(name), ranks, ranks)
        formulas = (formula_of(name), Formula(str(rounds), str(most), str(wire)))
        cells = [op, algorithm, *(times(f.rounds, "α") if op == "barrier" else f.time("M") for f in formulas)]
        shown = _shown(op, sizes)
        cells += [_times(own, shown, op=op, algorithm=algorithm, transport=transport) for transport in transports]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_library(rows: Sequence[dict[str, Any]], copies: Sequence[dict[str, Any]], sizes: Sequence[int]) -> str:
    libraries = list(dict.fromkeys(row["transport"] for row in rows))
    heads = ["fastest of each", *libraries, "copying"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for op in dict.fromkeys(row["op"] for row in rows):
        cells = [_times(rows, _shown(op, sizes), op=op, transport=name) for name in libraries]
        lines.append("| " + " | ".join([op, *cells, _times(copies, sizes, op=op)]) + " |")
    return "\n".join(lines)


def _shown(op: str, sizes: Sequence[int]) -> Sequence[int]:
    return [0] if op == "barrier" else sizes


def between_hosts(results: dict[str, Any]) -> str:
    """Times of collectives between hosts that hold several ranks each, beside what the wire alone would take."""
    rows = [row for row in results["rows"] if row["experiment"] == "hierarchical"]
    machine, (hosts, local, gbit) = results["machine"], (rows[0][key] for key in ("hosts", "ranks_per_host", "gbit"))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    lines = [
        f"{hosts} hosts with {local} ranks each, a link of {gbit:.2f} Gbit/s to each host; {machine['cores']} cores "
        f"({machine['cpu']}), torch {machine['torch']}. Milliseconds for {' / '.join(cases)}:",
        "",
        "| collective | algorithm | time | over a host's wire | measured |",
        "|---|---|---|---|---:|",
    ]
    for op, of_op in itertools.groupby(rows_by_collective(rows), key=collective_of):
        chosen = list(of_op)
        for system, setting in dict.fromkeys((row["system"], row["setting"]) for row in chosen):
            cells = [op, system, "", ""]
            if system == "paceline":
                name = setting.partition(" over ")[0]
                cells = [op, name.partition("/")[2], formula_of(name).time("M"), over_a_wire(name, hosts, local)]
            mine = [row for row in chosen if (row["system"], row["setting"]) == (system, setting)]
            lines.append("| " + " | ".join([*cells, _each({r["case"]: r["median_ms"] for r in mine}, cases)]) + " |")
        share = times(str(Fraction(2 * (hosts - 1), hosts) / (1 if op == "all_reduce" else 2)), "M")
        bound = [op, "what the wire alone takes", "", share, _each({r["case"]: r["wire_ms"] for r in chosen}, cases)]
        lines.append("| " + " | ".join(bound) + " |")
    return "\n".join(lines)


def rows_by_collective(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each collective together, in the order in which collectives first come."""
    order = list(dict.fromkeys(map(collective_of, rows)))
    return sorted(rows, key=lambda row: order.index(collective_of(row)))


def collective_of(row: dict[str, Any]) -> str:
    """Which collective a row of `paceline bench network` is about: "all_reduce" of "all_reduce/ring over tcp"."""
    return str(row["setting"]).partition(" over ")[0].partition("/")[0]


def over_a_wire(name: str, hosts: int, local: int) -> str:
    """What an algorithm sends over the busiest host's wire, each way."""
    ranks = hosts * local
    places = tuple(str(rank // local) for rank in range(ranks))
    sent = predict_seconds(find_algorithm(name, local), ranks, Topology(places, local, None, Link(alpha=0.0, beta=1.0)))
    return times(str(Fraction(sent) / ranks), "M")


def _each(took: dict[str, float], cases: Sequence[str]) -> str:
    return " / ".join(_milliseconds(took[case]) if case in took else "" for case in cases)


def _times(rows: Sequence[dict[str, Any]], sizes: Sequence[int], **which: str) -> str:
    """The least time of those rows at each size; a size that was not measured leaves its place empty."""
    chosen = [row for row in rows if which.items() <= row.items()]
    least = [min((row["time_us"] for row in chosen if row["bytes"] == size), default=None) for size in sizes]
    return " / ".join("" if time is None else _milliseconds(time / 1e3) for time in least) if chosen else ""


def _milliseconds(time: float) -> str:
    return f"{time:.{max(0, min(3, 1 - math.floor(math.log10(time))))}f}"


def size_text(size: int) -> str:
    """64 KiB, 1.25 MiB."""
    return f"{size / 2**20:.3g} MiB" if size >= 1 << 20 else f"{size / 2**10:.3g} KiB"
