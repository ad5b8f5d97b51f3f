"""What ranks tell each other in torch's store, before there is a process group."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import torch.distributed as dist

from paceline.comm.authentication import new_secret
from paceline.comm.patience import require_unbroken

_POLL_SECONDS = 0.001
"""Between two looks, at first; then as long as a tenth of what was waited."""
_LONGEST_POLL_SECONDS = 0.02
"""Of rank 0, for which all others wait."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.2
"""Of the others, which may be a thousand; sooner at first, as ranks ask each other a dozen things one by one."""


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
        CommunicationError: It is known that some will not.
    """
    own, began = secrets.token_hex(16), time.monotonic()
    store.set(f"hello {rank}", own)
    if rank:
        name: str = said(store, f"welcome {own}", seconds).decode()
        store.set(f"{name} {rank}", "")
        return name
    welcomed: set[bytes] = set()
    others = range(1, world_size)
    while True:
        for other in others:
            if (word := said(store, f"hello {other}", seconds)) not in welcomed:
                store.set(f"welcome {word.decode()}", own)
                welcomed.add(word)
        if store.check([f"{own} {other}" for other in others]):
            return own
        require_unbroken()
        if (waited := time.monotonic() - began) > seconds:
            missing = [str(other) for other in others if not store.check([f"{own} {other}"])]
            raise dist.DistStoreError(f"rank {', '.join(missing)} did not come within {seconds:g} s")
        time.sleep(min(max(_POLL_SECONDS, waited / 10), _LONGEST_POLL_SECONDS))


def said(store: Any, key: str, seconds: float) -> bytes:
    """What somebody says in a store, once it is there: torch's own wait hears of nothing else meanwhile.

    Raises:
        torch.distributed.DistStoreError: It was not there within `seconds`.
        CommunicationError: It is known that another rank will not come.
    """
    began = time.monotonic()
    while not store.check([key]):
        require_unbroken()
        if (waited := time.monotonic() - began) > seconds:
            raise dist.DistStoreError(f"timeout waiting {seconds:g} s for {key}")
        time.sleep(min(max(_SHORTEST_PAUSE_SECONDS, waited / 10), _LONGEST_PAUSE_SECONDS))
    found: bytes = store.get(key)
    return found


def tell_all(value: Any, store: Any, rank: int, world_size: int, seconds: float) -> list[Any]:
    """Every rank's JSON-ready value, in rank order. A collective call.

    Args:
        value: This rank's.
        store: Where ranks meet; nothing else uses its keys.
        rank: Of this process.
        world_size: Number of ranks.
        seconds: To wait for the others.

    Raises:
        torch.distributed.DistStoreError, CommunicationError: See `said`.
    """
    # Rank 0 alone reads them all: a thousand ranks would ask the store a million times.
    store.set(f"rank {rank}", json.dumps(value))
    if rank == 0:
        told = [json.loads(said(store, f"rank {other}", seconds)) for other in range(world_size)]
        store.set("all", json.dumps(told))
    found: list[Any] = json.loads(said(store, "all", seconds))
    return found


def share_secret(store: Any, rank: int, seconds: float) -> bytes:
    """The job's secret, which rank 0 makes, waited for so long. Who can read the store can read it."""
    if rank == 0:
        store.set("secret", new_secret())
    return bytes.fromhex(said(store, "secret", seconds).decode())
