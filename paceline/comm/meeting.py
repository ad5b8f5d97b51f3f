"""What ranks tell each other in torch's store, before there is a process group."""

from __future__ import annotations

import json
from typing import Any

from paceline.comm.authentication import new_secret


def tell_all(value: Any, store: Any, rank: int, world_size: int) -> list[Any]:
    """Every rank's JSON-ready value, in rank order. A collective call.

    Args:
        value: This rank's.
        store: Where ranks meet; nothing else uses its keys.
        rank: Of this process.
        world_size: Number of ranks.
    """
    # Rank 0 alone reads them all: a thousand ranks would ask the store a million times.
    store.set(f"rank {rank}", json.dumps(value))
    if rank == 0:
        store.set("all", json.dumps([json.loads(store.get(f"rank {other}")) for other in range(world_size)]))
    found: list[Any] = json.loads(store.get("all"))
    return found


def share_secret(store: Any, rank: int) -> bytes:
    """The job's secret, which rank 0 makes. Who can read the store can read it."""
    if rank == 0:
        store.set("secret", new_secret())
    return bytes.fromhex(store.get("secret").decode())
