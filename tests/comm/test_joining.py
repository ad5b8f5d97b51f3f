"""A rank that waits for others to join a job."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

import paceline as pl
from paceline.comm import world
from paceline.core.errors import UserError
from paceline.launch.worker import lost_a_peer
from tests.ranks import RankPool


def joins_alone(environment: dict[str, str], timeout: float) -> tuple[bool, str]:
    """Whether a rank that nobody joins counts as having lost a peer, and what it says."""
    pl.shutdown()
    with patch.dict(os.environ, environment), patch.object(world, "_JOINING_SECONDS", 2.0):
        with pytest.raises(UserError) as caught:
            pl.init(timeout=timeout)
        return lost_a_peer(caught.value), str(caught.value)


@pytest.mark.parametrize("given", ["by the launcher", pytest.param("by the caller", marks=pytest.mark.full)])
def test_one_that_nobody_joins_says_so_and_counts_as_having_lost_a_peer(
    ranks: RankPool, tmp_path: Path, given: str
) -> None:
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "PACELINE_RENDEZVOUS": f"file://{tmp_path}/store",
        **({"PACELINE_JOINING_SECONDS": "1"} if given == "by the launcher" else {}),
    }
    ((lost, told),) = ranks(1, joins_alone, environment, 600 if given == "by the launcher" else 1)
    assert lost and told.startswith("rank 0 could not join the job at file://")
    assert "if ranks are missing, see that all 2 were started" in told
