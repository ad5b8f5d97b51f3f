"""What ranks agree on in a store in which others have met before them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import paceline as pl
from paceline.comm import meeting
from paceline.comm.folder_store import FolderStore
from paceline.comm.patience import end_waits_when


def met(file: Path, ranks: int, late: int | None = None) -> list[str]:
    """What each of some ranks takes for the name of their job; `late` comes after the others."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        store = dist.FileStore(str(file), -1)
        store.set_timeout(timedelta(seconds=60))
        if rank == late:
            time.sleep(0.5)
        found[rank] = meeting.agree(store, rank, ranks, 60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_ranks_that_start_again_do_not_meet_those_of_an_earlier_attempt(tmp_path: Path, late: int | None) -> None:
    names = [met(tmp_path / "store", 3, late) for _ in range(3)]
    assert all(len(set(attempt)) == 1 for attempt in names)
    assert len({attempt[0] for attempt in names}) == 3


def test_an_attempt_that_lost_a_rank_before_it_came_is_not_taken_up(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("hello 1", "of a rank that is gone")
    store.set("hello 2", "of another")
    assert len(set(met(tmp_path / "store", 3))) == 1


def test_ranks_that_do_not_come_are_an_error_in_time(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("hello 1", "of a rank that is gone")
    with pytest.raises(dist.DistError, match=r"rank 1 did not come within 0\.2 s"):
        meeting.agree(store, 0, 2, 0.2)


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_is_waited_for_of_whom_it_is_known_that_he_will_not_come(tmp_path: Path, rank: int) -> None:
    store, began = FolderStore(tmp_path / "store"), time.monotonic()
    end_waits_when(lambda: "rank 2 is gone" if time.monotonic() > began + 0.3 else "")
    try:
        with pytest.raises(pl.CommunicationError, match="rank 2 is gone"):
            meeting.agree(store, rank, 3, 60)
    finally:
        end_waits_when(str)
