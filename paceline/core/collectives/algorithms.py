"""The algorithms of each collective.

Seven ways to hand data out are written down (`patterns`), and an eighth for several hosts. Most of the rest follows:
run backwards they collect, one after another they do both.
"""

from __future__ import annotations

from functools import cache

from paceline.core.collectives.patterns import (
    direct_all_gather,
    direct_all_to_all,
    direct_barrier,
    doubling_all_gather,
    doubling_all_reduce,
    doubling_barrier,
    hierarchical_all_gather,
    pairwise_all_to_all,
    ring_all_gather,
    server_broadcast,
    server_scatter,
    tree_broadcast,
    tree_scatter,
)
from paceline.core.collectives.rounds import (
    Algorithm,
    Traffic,
    chunk,
    in_sequence,
    reverse,
    traffic_of,
    with_root,
)


def _token(algorithm: Algorithm) -> Algorithm:
    """The algorithm over one element, for a buffer of any size."""
    return lambda rank, world_size, numel: algorithm(rank, world_size, min(numel, 1))


_server_reduce = reverse(server_broadcast, "add", root_alone=True)
_tree_reduce = reverse(tree_broadcast, "add", root_alone=True)
_direct_reduce_scatter = reverse(direct_all_gather, "add")
_ring_reduce_scatter = reverse(ring_all_gather, "add")
_halving_reduce_scatter = reverse(doubling_all_gather, "add")

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "broadcast": {
        "server": server_broadcast,
        "tree": tree_broadcast,
        "ring": in_sequence(server_scatter, ring_all_gather),
    },
    "reduce": {
        "server": _server_reduce,
        "tree": _tree_reduce,
        "ring": in_sequence(_ring_reduce_scatter, reverse(server_scatter, "replace")),
    },
    "scatter": {"server": server_scatter, "tree": tree_scatter},
    "gather": {"server": reverse(server_scatter, "replace"), "tree": reverse(tree_scatter, "replace")},
    "all_gather": {
        "direct": direct_all_gather,
        "ring": ring_all_gather,
        "doubling": doubling_all_gather,
        "server": in_sequence(reverse(server_scatter, "replace"), server_broadcast),
    },
    "reduce_scatter": {
        "direct": _direct_reduce_scatter,
        "ring": _ring_reduce_scatter,
        "halving": _halving_reduce_scatter,
        "server": in_sequence(_server_reduce, server_scatter),
    },
    "all_reduce": {
        "direct": in_sequence(_direct_reduce_scatter, direct_all_gather),
        "ring": in_sequence(_ring_reduce_scatter, ring_all_gather),
        "halving": in_sequence(_halving_reduce_scatter, doubling_all_gather),
        "doubling": doubling_all_reduce,
        "tree": in_sequence(_tree_reduce, tree_broadcast),
        "server": in_sequence(_server_reduce, server_broadcast),
    },
    "all_to_all": {"direct": direct_all_to_all, "pairwise": pairwise_all_to_all},
    "barrier": {
        "doubling": _token(doubling_barrier),
        "direct": _token(direct_barrier),
        "tree": _token(in_sequence(_tree_reduce, tree_broadcast)),
        "server": _token(in_sequence(_server_reduce, server_broadcast)),
    },
}
"""By collective and name; a collective's first is what it is by default."""

ROOTED = ("broadcast", "reduce", "scatter", "gather")
"""Collectives from or to one rank."""

REDUCTIONS = ("reduce", "reduce_scatter", "all_reduce")
"""Collectives that add."""

BANDWIDTH_OPTIMAL = {
    "all_gather": ("direct", "ring", "doubling", "hierarchical"),
    "reduce_scatter": ("direct", "ring", "halving", "hierarchical"),
    "all_reduce": ("direct", "ring", "halving", "hierarchical"),
}
"""Algorithms that move no more than must be moved, hence the same amounts, where N divides the buffer."""

HIERARCHICAL = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that have a "hierarchical" algorithm too, where every host has as many ranks."""


@cache
def find_algorithm(name: str, ranks_per_host: int = 0) -> Algorithm:
    """The algorithm of a collective.

    Args:
        name: "all_reduce" for the default algorithm, or with one: "all_reduce/ring"; with the root of a rooted one, if
            it is not rank 0: "broadcast/tree@3".
        ranks_per_host: Ranks on each host, for "hierarchical".

    Raises:
        ValueError: There is no such collective or algorithm; says which there are.
    """
    name, _, root = name.partition("@")
    collective, _, wanted = name.partition("/")
    if collective not in ALGORITHMS:
        raise ValueError(f"collective: expected one of {', '.join(ALGORITHMS)}; got {collective!r}")
    known = ALGORITHMS[collective]
    if wanted == "hierarchical" and collective in HIERARCHICAL:
        if not ranks_per_host:
            raise ValueError(f"{name}: needs as many ranks on every host, numbered host by host")
        gather = hierarchical_all_gather(ranks_per_host)
        scatter = reverse(gather, "add")
        return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": in_sequence(scatter, gather)}[collective]
    if wanted and wanted not in known:
        raise ValueError(f"algorithm of {collective}: expected one of {', '.join(known)}; got {wanted!r}")
    algorithm = known[wanted or next(iter(known))]
    if root and collective not in ROOTED:
        raise ValueError(f"root: {', '.join(ROOTED)} have one, {collective} has none")
    return with_root(algorithm, int(root or 0))


@cache
def traffic(name: str, rank: int, world_size: int, numel: int) -> Traffic:
    """Elements that `rank` sends and receives in one collective over `numel` elements; see `find_algorithm`.

    Those of `BANDWIDTH_OPTIMAL` move the same amounts as each other. Of the defaults that schedules use there is no
    loop over ranks, so that a hundred thousand of them cost nothing to plan for.
    """
    if name in BANDWIDTH_OPTIMAL:
        first, stop = chunk(rank, world_size, numel)
        own = stop - first
        others, alike = numel - own, own * (world_size - 1)
        if name == "all_gather":
            return Traffic(alike, others)
        return Traffic(others, alike) if name == "reduce_scatter" else Traffic(others + alike, alike + others)
    return traffic_of(find_algorithm(name), rank, world_size, numel)
