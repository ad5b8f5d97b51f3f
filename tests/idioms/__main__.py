"""`python -m tests.idioms`: runs every idiom everywhere and says what became of it.

Exits with 1 if one is wrong, or refused nowhere where it is said to be.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

import torch

from tests.idioms.run import IDIOMS, PLACES, held, place_names
from tests.ranks import RankPool


def main() -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.idioms", description=__doc__)
    parser.add_argument("--idiom", nargs="+", help="only those with these words in their names")
    parser.add_argument("--place", nargs="+", help="only those")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pool, began, kinds = RankPool(), time.monotonic(), Counter[str]()
    for name in IDIOMS:
        if arguments.idiom and not any(word in name for word in arguments.idiom):
            continue
        refused = set()
        for place in arguments.place or PLACES:
            kind, why = held(name, place, pool)
            kinds[kind] += 1
            refused |= {where for where, _ in IDIOMS[name].refused if kind == "refused" and where in place_names(place)}
            if kind not in ("right", "refused", "left out"):
                print(f"{kind}  {name}: {place}\n  {why}\n", flush=True)
        if not arguments.place and (stale := {where for where, _ in IDIOMS[name].refused} - refused):
            kinds["stale"] += 1
            print(f"stale  {name}: said to be refused at {', '.join(sorted(stale))}\n", flush=True)
    pool.close()
    print(f"{dict(kinds)} of {len(IDIOMS)} idioms in {time.monotonic() - began:.0f} s")
    return int(set(kinds) - {"right", "refused", "left out"} != set())


if __name__ == "__main__":
    sys.exit(main())
