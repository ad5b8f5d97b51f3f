"""The algorithms of each collective, as plans, for any number of ranks.

Seven ways to hand data out are written down. The rest follows: run backwards they collect, one after another they
do both.

Buffers hold one shard for each rank (`plan.shard`). Rooted collectives are written with their root at rank 0;
`plan.rooted` turns them.
"""

from __future__ import annotations

from functools import cache

from paceline.comm.plan import Part, Plan, Round, Traffic, backwards, exchanged, rooted, shard, shards, then

# ---- from rank 0 to all


def server_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Rank 0 sends its whole buffer to every other rank: M (N-1) bytes leave it, the server's bottleneck."""
    if rank:
        return (Round((), (Part(0, 0, numel),), "replace"),)
    return (Round(tuple(Part(peer, 0, numel) for peer in range(1, world_size)), (), "replace"),)


def server_scatter(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Rank 0 sends every other rank its shard."""
    if rank:
        return (Round((), (Part(0, *shard(rank, world_size, numel)),), "replace"),)
    return (Round(tuple(Part(peer, *shard(peer, world_size, numel)) for peer in range(1, world_size)), (), "replace"),)


def tree_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Divide and conquer: each rank that has the data sends it to one that has not, and each serves half of the rest.

    ceil(log2 N) rounds: 8 ranks, 5 MB at 1 MB/s take 15 s, where one after another takes 35 s.
    """
    return tuple(_hand_over(rank, giver, taker, 0, numel) for giver, taker, _ in _halvings(rank, world_size))


def tree_scatter(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """As the tree's broadcast, but a rank is sent only the shards of the half that it serves."""
    rounds = []
    for giver, taker, end in _halvings(rank, world_size):
        start, stop = shard(taker, world_size, numel)[0], shard(end - 1, world_size, numel)[1]
        rounds.append(_hand_over(rank, giver, taker, start, stop))
    return tuple(rounds)


def _halvings(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """For each round, in the group of neighbours that `rank` is in: who gives, who takes, and the group's end.

    A group's first rank has the data; it gives to the first of the upper half, and the halves go on by themselves.
    Groups of one rank have nothing to give: giver and taker are the same.
    """
    rounds = []
    first, end = 0, world_size
    for _ in range((world_size - 1).bit_length()):
        middle = first + (end - first + 1) // 2
        if middle >= end:
            rounds.append((first, first, end))
            continue
        rounds.append((first, middle, end))
        first, end = (first, middle) if rank < middle else (middle, end)
    return rounds


def _hand_over(rank: int, giver: int, taker: int, start: int, stop: int) -> Round:
    sends = (Part(taker, start, stop),) if rank == giver != taker else ()
    receives = (Part(giver, start, stop),) if rank == taker != giver else ()
    return Round(sends, receives, "replace")


# ---- from each to all


def direct_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends its shard to every other, all at once: one round."""
    own = shard(rank, world_size, numel)
    peers = [peer for peer in range(world_size) if peer != rank]
    return (
        Round(
            tuple(Part(peer, *own) for peer in peers),
            tuple(Part(peer, *shard(peer, world_size, numel)) for peer in peers),
            "replace",
        ),
    )


def ring_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Shards travel around the ring, to the next rank in each round: N-1 rounds.

    Run backwards it is the ring's reduce-scatter; both together send 2(N-1)/N of the buffer, 1.8 M for N=10 and
    1.998 M for N=1000, in 2(N-1) rounds.
    """
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    return tuple(
        Round(
            (Part(after, *shard((rank - turn) % world_size, world_size, numel)),),
            (Part(before, *shard((before - turn) % world_size, world_size, numel)),),
            "replace",
        )
        for turn in range(world_size - 1)
    )


def doubling_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Each round doubles what a rank has, its own shard and its predecessors': ceil(log2 N) rounds.

    Bruck et al. 1997, with every shard at its place in the buffer from the start. Run backwards, what a rank still
    sums halves in each round.
    """
    rounds = []
    have = 1
    while have < world_size:
        count = min(have, world_size - have)
        after, before = (rank + have) % world_size, (rank - have) % world_size
        first = (rank - count + 1) % world_size
        rounds.append(
            Round(
                tuple(Part(after, *span) for span in shards(first, count, world_size, numel)),
                tuple(
                    Part(before, *span) for span in shards((before - count + 1) % world_size, count, world_size, numel)
                ),
                "replace",
            )
        )
        have += count
    return tuple(rounds)


def hierarchical_all_gather(ranks_per_host: int) -> Plan:
    """Each shard crosses to every other host once, then spreads inside it: two rounds.

    Ranks of one host are neighbours, as many on each host.

    Args:
        ranks_per_host: Ranks on each host; divides the number of ranks.
    """

    def plan(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        host, local = divmod(rank, ranks_per_host)
        hosts = world_size // ranks_per_host
        column = [other * ranks_per_host + local for other in range(hosts) if other != host]
        neighbours = [host * ranks_per_host + other for other in range(ranks_per_host) if other != local]
        own = shard(rank, world_size, numel)

        def columns(of: int) -> list[tuple[int, int]]:
            return [shard(h * ranks_per_host + of % ranks_per_host, world_size, numel) for h in range(hosts)]

        return (
            Round(
                tuple(Part(peer, *own) for peer in column),
                tuple(Part(peer, *shard(peer, world_size, numel)) for peer in column),
                "replace",
            ),
            Round(
                tuple(Part(peer, *span) for peer in neighbours for span in columns(rank)),
                tuple(Part(peer, *span) for peer in neighbours for span in columns(peer)),
                "replace",
            ),
        )

    return plan


# ---- from each to each


def doubling_all_reduce(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Pairs exchange and add whole buffers, at twice the distance in each round: log2 N rounds of the whole buffer.

    Fewest rounds, for small buffers. With N no power of two, the ranks above the largest one lend their elements to
    one below before, and are sent the sums after.
    """
    power = 1 << (world_size.bit_length() - 1)
    everything = (0, numel)
    extra = world_size - power
    rounds = []
    lends = Round((Part(rank - power, *everything),), (), "add") if rank >= power else Round((), (), "add")
    if extra:
        takes = Round((), (Part(rank + power, *everything),), "add") if rank < extra else Round((), (), "add")
        rounds.append(lends if rank >= power else takes)
    distance = 1
    while distance < power:
        peer = (Part(rank ^ distance, *everything),) if rank < power else ()
        rounds.append(Round(peer, peer, "add", complete=bool(peer) and 2 * distance == power))
        distance *= 2
    if extra:
        last = rounds[0]
        rounds.append(Round(last.receives, last.sends, "replace"))
    return tuple(rounds)


def direct_all_to_all(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends every other its shard for it, all at once: one round. N divides `numel`."""
    parts = tuple(Part(peer, *shard(peer, world_size, numel)) for peer in range(world_size) if peer != rank)
    return (Round(parts, parts, "replace", crossed=True),)


def pairwise_all_to_all(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Each pair of ranks exchanges its two shards in a round of its own, one pair a rank: N rounds."""
    rounds = []
    for turn in range(world_size):
        peer = (turn - rank) % world_size
        parts = (Part(peer, *shard(peer, world_size, numel)),) if peer != rank else ()
        rounds.append(Round(parts, parts, "replace", crossed=True))
    return tuple(rounds)


def doubling_barrier(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """A token to the rank at twice the distance in each round: after ceil(log2 N) all have heard of all."""
    rounds = []
    distance = 1
    while distance < world_size:
        after, before = (rank + distance) % world_size, (rank - distance) % world_size
        rounds.append(Round((Part(after, 0, numel),), (Part(before, 0, numel),), "replace"))
        distance *= 2
    return tuple(rounds)


def direct_barrier(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """A token to every other rank: one round."""
    tokens = tuple(Part(peer, 0, numel) for peer in range(world_size) if peer != rank)
    return (Round(tokens, tokens, "replace"),)


def _token(plan: Plan) -> Plan:
    """A plan over one element, whatever the buffer's size."""
    return lambda rank, world_size, numel: plan(rank, world_size, min(numel, 1))


# ---- all of them

_server_reduce = backwards(server_broadcast, "add", root_alone=True)
_tree_reduce = backwards(tree_broadcast, "add", root_alone=True)
_direct_reduce_scatter = backwards(direct_all_gather, "add")
_ring_reduce_scatter = backwards(ring_all_gather, "add")
_halving_reduce_scatter = backwards(doubling_all_gather, "add")

ALGORITHMS: dict[str, dict[str, Plan]] = {
    "broadcast": {
        "server": server_broadcast,
        "tree": tree_broadcast,
        "ring": then(server_scatter, ring_all_gather),
    },
    "reduce": {
        "server": _server_reduce,
        "tree": _tree_reduce,
        "ring": then(_ring_reduce_scatter, backwards(server_scatter, "replace")),
    },
    "scatter": {"server": server_scatter, "tree": tree_scatter},
    "gather": {"server": backwards(server_scatter, "replace"), "tree": backwards(tree_scatter, "replace")},
    "all_gather": {
        "direct": direct_all_gather,
        "ring": ring_all_gather,
        "doubling": doubling_all_gather,
        "server": then(backwards(server_scatter, "replace"), server_broadcast),
    },
    "reduce_scatter": {
        "direct": _direct_reduce_scatter,
        "ring": _ring_reduce_scatter,
        "halving": _halving_reduce_scatter,
        "server": then(_server_reduce, server_scatter),
    },
    "all_reduce": {
        "direct": then(_direct_reduce_scatter, direct_all_gather),
        "ring": then(_ring_reduce_scatter, ring_all_gather),
        "halving": then(_halving_reduce_scatter, doubling_all_gather),
        "doubling": doubling_all_reduce,
        "tree": then(_tree_reduce, tree_broadcast),
        "server": then(_server_reduce, server_broadcast),
    },
    "all_to_all": {"direct": direct_all_to_all, "pairwise": pairwise_all_to_all},
    "barrier": {
        "doubling": _token(doubling_barrier),
        "direct": _token(direct_barrier),
        "tree": _token(then(_tree_reduce, tree_broadcast)),
        "server": _token(then(_server_reduce, server_broadcast)),
    },
}
"""Plans by collective and algorithm; a collective's first is what it is by default."""

ROOTED = ("broadcast", "reduce", "scatter", "gather")
"""Collectives from or to one rank."""

SUMS = ("reduce", "reduce_scatter", "all_reduce")
"""Collectives that add."""

LEAST = {
    "all_gather": ("direct", "ring", "doubling", "hierarchical"),
    "reduce_scatter": ("direct", "ring", "halving", "hierarchical"),
    "all_reduce": ("direct", "ring", "halving", "hierarchical"),
}
"""Algorithms that move no more than must be moved, hence the same amounts, where N divides the buffer."""

HIERARCHICAL = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that have a "hierarchical" algorithm too, where every host has as many ranks."""


@cache
def find_plan(name: str, ranks_per_host: int = 0) -> Plan:
    """The plan of a collective.

    Args:
        name: "all_reduce" for the default algorithm, or with one: "all_reduce/ring"; with the root of a rooted one, if
            it is not rank 0: "broadcast/tree@3".
        ranks_per_host: Ranks on each host, for "hierarchical".

    Raises:
        ValueError: There is no such collective or algorithm; says which there are.
    """
    name, _, root = name.partition("@")
    collective, _, algorithm = name.partition("/")
    if collective not in ALGORITHMS:
        raise ValueError(f"collective: expected one of {', '.join(ALGORITHMS)}; got {collective!r}")
    known = ALGORITHMS[collective]
    if algorithm == "hierarchical" and collective in HIERARCHICAL:
        if not ranks_per_host:
            raise ValueError(f"{name}: needs as many ranks on every host, numbered host by host")
        gather = hierarchical_all_gather(ranks_per_host)
        scatter = backwards(gather, "add")
        return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": then(scatter, gather)}[collective]
    if algorithm and algorithm not in known:
        raise ValueError(f"algorithm of {collective}: expected one of {', '.join(known)}; got {algorithm!r}")
    plan = known[algorithm or next(iter(known))]
    if root and collective not in ROOTED:
        raise ValueError(f"root: {', '.join(ROOTED)} have one, {collective} has none")
    return rooted(plan, int(root or 0))


@cache
def traffic(name: str, rank: int, world_size: int, numel: int) -> Traffic:
    """Elements that `rank` sends and receives in one collective over `numel` elements; see `find_plan`.

    Those of `LEAST` move the same amounts as each other.
    """
    return exchanged(find_plan(name), rank, world_size, numel)
