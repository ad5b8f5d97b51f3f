"""A rank that waits for others to join a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.train.processes import finished

ALONE = """
import paceline as pl
from paceline.comm import world
from paceline.core.errors import UserError
from paceline.launch.worker import lost_a_peer
world._JOINING_SECONDS = 2.0
try:
    pl.init(timeout=float({timeout}))
except UserError as error:
    print(lost_a_peer(error), error)
"""


@pytest.mark.parametrize("given", ["by the launcher", pytest.param("by the caller", marks=pytest.mark.full)])
def test_one_that_nobody_joins_says_so_and_counts_as_having_lost_a_peer(tmp_path: Path, given: str) -> None:
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "PACELINE_RENDEZVOUS": f"file://{tmp_path}/store",
        **({"PACELINE_JOINING_SECONDS": "1"} if given == "by the launcher" else {}),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    timeout = "600" if given == "by the launcher" else "1"
    command = [sys.executable, "-c", ALONE.format(timeout=timeout)]
    status, out, err = finished(command, tmp_path, environment)
    assert status == 0, err
    assert out.startswith("True rank 0 could not join the job at file://")
    assert "if ranks are missing, see that all 2 were started" in out
