"""What ranks tell each other in torch's store, before there is a process group."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import torch.distributed as dist

from paceline.comm.authentication import new_secret

_POLL_SECONDS = 0.001
"""Between two looks, at first; then as long as a tenth of what was waited."""
_LONGEST_POLL_SECONDS = 0.02


def agree(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """A name for the job that no other has met by in this store. A collective call.

    Torchrun keeps one store for all its attempts at a job, so what ranks of an earlier one said is still there. Rank 0
    answers each rank's new word, and again if that was an old one, until all have heard of its own.

    Args:
        store: Where ranks meet.
        rank: Of this process.
        world_size: Number of ranks.
        seconds: To wait for the others.

    Raises:
        torch.distributed.DistStoreError: Some did not come.
    """
    own, began = secrets.token_hex(16), time.monotonic()
    store.set(f"hello {rank}", own)
    if rank:
        name: str = store.get(f"welcome {own}").decode()
        store.set(f"{name} {rank}", "")
        return name
    welcomed: set[bytes] = set()
    others = range(1, world_size)
    while True:
        for other in others:
            if (word := store.get(f"hello {other}")) not in welcomed:
                store.set(f"welcome {word.decode()}", own)
                welcomed.add(word)
        if store.check([f"{own} {other}" for other in others]):
            return own
        if (waited := time.monotonic() - began) > seconds:
            missing = [str(other) for other in others if not store.check([f"{own} {other}"])]
            raise dist.DistStoreError(f"rank {', '.join(missing)} did not come within {seconds:g} s")
        time.sleep(min(max(_POLL_SECONDS, waited / 10), _LONGEST_POLL_SECONDS))


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
