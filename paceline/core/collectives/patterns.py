"""The patterns in which ranks exchange data, for any number of ranks: from one to all, and from each to all.

Buffers hold one chunk for each rank (`rounds.chunk`). What has a root is written with rank 0 for it.
"""

from __future__ import annotations

from paceline.core.collectives.rounds import Algorithm, Round, Transfer, chunk, chunks

# ---- from rank 0 to all


def server_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Rank 0 sends its whole buffer to every other rank: M (N-1) bytes leave it, the server's bottleneck."""
    if rank:
        return (Round((), (Transfer(0, 0, numel),), "replace"),)
    return (Round(tuple(Transfer(peer, 0, numel) for peer in range(1, world_size)), (), "replace"),)


def server_scatter(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Rank 0 sends every other rank its chunk."""
    if rank:
        return (Round((), (Transfer(0, *chunk(rank, world_size, numel)),), "replace"),)
    return (
        Round(tuple(Transfer(peer, *chunk(peer, world_size, numel)) for peer in range(1, world_size)), (), "replace"),
    )


def tree_broadcast(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Divide and conquer: each rank that has the data sends it to one that has not, and each serves half of the rest.

    ceil(log2 N) rounds: 8 ranks, 5 MB at 1 MB/s take 15 s, where one after another takes 35 s.
    """
    return tuple(_hand_over(rank, giver, taker, 0, numel) for giver, taker, _ in _halvings(rank, world_size))


def tree_scatter(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """As the tree's broadcast, but a rank is sent only the chunks of the half that it serves."""
    rounds = []
    for giver, taker, end in _halvings(rank, world_size):
        start, stop = chunk(taker, world_size, numel)[0], chunk(end - 1, world_size, numel)[1]
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
    sends = (Transfer(taker, start, stop),) if rank == giver != taker else ()
    receives = (Transfer(giver, start, stop),) if rank == taker != giver else ()
    return Round(sends, receives, "replace")


# ---- from each to all


def direct_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends its chunk to every other, all at once: one round."""
    own = chunk(rank, world_size, numel)
    peers = [peer for peer in range(world_size) if peer != rank]
    return (
        Round(
            tuple(Transfer(peer, *own) for peer in peers),
            tuple(Transfer(peer, *chunk(peer, world_size, numel)) for peer in peers),
            "replace",
        ),
    )


def ring_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Chunks travel around the ring, to the next rank in each round: N-1 rounds.

    Run backwards it is the ring's reduce-scatter; both together send 2(N-1)/N of the buffer, 1.8 M for N=10 and
    1.998 M for N=1000, in 2(N-1) rounds.
    """
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    return tuple(
        Round(
            (Transfer(after, *chunk((rank - turn) % world_size, world_size, numel)),),
            (Transfer(before, *chunk((before - turn) % world_size, world_size, numel)),),
            "replace",
        )
        for turn in range(world_size - 1)
    )


def doubling_all_gather(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Each round doubles what a rank has, its own chunk and its predecessors': ceil(log2 N) rounds.

    Bruck et al. 1997, with every chunk at its place in the buffer from the start. Run backwards, what a rank still
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
                tuple(Transfer(after, *span) for span in chunks(first, count, world_size, numel)),
                tuple(
                    Transfer(before, *span)
                    for span in chunks((before - count + 1) % world_size, count, world_size, numel)
                ),
                "replace",
            )
        )
        have += count
    return tuple(rounds)


def hierarchical_all_gather(ranks_per_host: int) -> Algorithm:
    """Each chunk crosses to every other host once, then spreads inside it: two rounds.

    Ranks of one host are neighbours, as many on each host.

    Args:
        ranks_per_host: Ranks on each host; divides the number of ranks.
    """

    def algorithm(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
        host, local = divmod(rank, ranks_per_host)
        hosts = world_size // ranks_per_host
        column = [other * ranks_per_host + local for other in range(hosts) if other != host]
        neighbours = [host * ranks_per_host + other for other in range(ranks_per_host) if other != local]
        own = chunk(rank, world_size, numel)

        def columns(of: int) -> list[tuple[int, int]]:
            return [chunk(h * ranks_per_host + of % ranks_per_host, world_size, numel) for h in range(hosts)]

        return (
            Round(
                tuple(Transfer(peer, *own) for peer in column),
                tuple(Transfer(peer, *chunk(peer, world_size, numel)) for peer in column),
                "replace",
            ),
            Round(
                tuple(Transfer(peer, *span) for peer in neighbours for span in columns(rank)),
                tuple(Transfer(peer, *span) for peer in neighbours for span in columns(peer)),
                "replace",
            ),
        )

    return algorithm


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
    lends = Round((Transfer(rank - power, *everything),), (), "add") if rank >= power else Round((), (), "add")
    if extra:
        takes = Round((), (Transfer(rank + power, *everything),), "add") if rank < extra else Round((), (), "add")
        rounds.append(lends if rank >= power else takes)
    distance = 1
    while distance < power:
        peer = (Transfer(rank ^ distance, *everything),) if rank < power else ()
        rounds.append(Round(peer, peer, "add", complete=bool(peer) and 2 * distance == power))
        distance *= 2
    if extra:
        last = rounds[0]
        rounds.append(Round(last.receives, last.sends, "replace"))
    return tuple(rounds)


def direct_all_to_all(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Every rank sends every other its chunk for it, all at once: one round. N divides `numel`."""
    transfers = tuple(Transfer(peer, *chunk(peer, world_size, numel)) for peer in range(world_size) if peer != rank)
    return (Round(transfers, transfers, "replace", transposed=True),)


def pairwise_all_to_all(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """Each pair of ranks exchanges its two chunks in a round of its own, one pair a rank: N rounds."""
    rounds = []
    for turn in range(world_size):
        peer = (turn - rank) % world_size
        transfers = (Transfer(peer, *chunk(peer, world_size, numel)),) if peer != rank else ()
        rounds.append(Round(transfers, transfers, "replace", transposed=True))
    return tuple(rounds)


def doubling_barrier(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """A token to the rank at twice the distance in each round: after ceil(log2 N) all have heard of all."""
    rounds = []
    distance = 1
    while distance < world_size:
        after, before = (rank + distance) % world_size, (rank - distance) % world_size
        rounds.append(Round((Transfer(after, 0, numel),), (Transfer(before, 0, numel),), "replace"))
        distance *= 2
    return tuple(rounds)


def direct_barrier(rank: int, world_size: int, numel: int) -> tuple[Round, ...]:
    """A token to every other rank: one round."""
    tokens = tuple(Transfer(peer, 0, numel) for peer in range(world_size) if peer != rank)
    return (Round(tokens, tokens, "replace"),)
