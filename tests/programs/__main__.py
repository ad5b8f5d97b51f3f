"""`python -m tests.programs --count 1000`: runs random programs and says what became of them.

Exits with status 1 if any failed. A failure is shown with its seed and what the program does; `--seed` repeats it.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch

from tests.programs.named import HOLES
from tests.programs.outcome import KINDS, Outcome
from tests.programs.program import Program, draw
from tests.programs.run import outcome
from tests.ranks import RankPool


def main() -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seed", type=int, nargs="+", help="only these")
    parser.add_argument("--zero", type=int, choices=range(4), help="the stage of all programs")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: see run.py")
    parser.add_argument("--holes", action="store_true", help="the named programs in place of random ones")
    parser.add_argument("--peer", choices=["paceline", "ddp"], default="paceline", help="what the ranks run")
    parser.add_argument("--quiet", action="store_true", help="only the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began, found = time.monotonic(), []
    pool = RankPool()
    for name, program in _programs(arguments):
        started = time.monotonic()
        result = outcome(program, pool, arguments.peer)
        found.append((name, program, result, time.monotonic() - started))
        if not result.fine and not arguments.quiet:
            print(f"{result.kind}  {name}\n{program.describe()}\n  {result.why}\n", flush=True)
    pool.close()
    _print_table([(program, result) for _, program, result, _ in found])
    _print_failures([(name, result) for name, _, result, _ in found])
    times = sorted(seconds for *_, seconds in found)
    median = times[len(times) // 2] * 1e3
    print(f"\n{len(found)} programs in {time.monotonic() - began:.0f} s, {median:.0f} ms in the median")
    return int(any(not result.fine for _, _, result, _ in found))


def _programs(arguments: argparse.Namespace) -> list[tuple[str, Program]]:
    if arguments.holes:
        return [(name, program) for name, program in HOLES.items() if arguments.zero in (None, program.strategy.zero)]
    fixed: dict[str, Any] = {} if arguments.zero is None else {"zero": arguments.zero}
    if arguments.precision != "float32":
        fixed["precision"] = arguments.precision
    seeds = arguments.seed or range(arguments.first, arguments.first + arguments.count)
    drawn = [(f"seed {seed}", draw(seed, **fixed)) for seed in seeds]
    # Those of as many ranks follow each other, as ranks then stay in their job.
    return sorted(drawn, key=lambda named: named[1].ranks)


def _print_table(found: list[tuple[Program, Outcome]]) -> None:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for program, result in found:
        shared = ", shared parameters" if program.strategy.share_parameters else ""
        for row in ("all", f" zero {program.strategy.zero}{shared}", *program.features()):
            rows[row][result.kind] += 1
    kinds = [kind for kind in KINDS if rows["all"][kind]]
    print(f"{'':42}" + "".join(f"{kind:>10}" for kind in kinds))
    for row in sorted(rows, key=lambda row: (row != "all", row)):
        print(f"{row:42}" + "".join(f"{rows[row][kind] or '':>10}" for kind in kinds))


def _print_failures(found: list[tuple[str, Outcome]]) -> None:
    """Each kind of failure once, with what it befell."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, result in found:
        if not result.fine:
            first = result.why.splitlines()[0] if result.why else ""
            said = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?|\binf\b", "#", first.split(": ", 1)[-1])
            if result.kind == "WRONG":
                said = "weights" if "model #" in said else said.split(", is off")[0]
            alike[f"{result.kind}: {said[:150]}"].append(name.removeprefix("seed "))
    for kind, names in sorted(alike.items(), key=lambda each: -len(each[1])):
        print(f"\n{len(names)} x {kind}\n    {', '.join(names[:16])}")


if __name__ == "__main__":
    sys.exit(main())
