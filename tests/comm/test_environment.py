from __future__ import annotations

import pytest

from paceline.comm.environment import job_in_environment, read_environment
from paceline.core.errors import UserError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "host[3-4]", "SLURM_JOB_ID": "7"}


def test_launchers_variables_are_understood() -> None:
    assert read_environment(TORCHRUN) == (1, 2, 1, 2, "env://")
    assert read_environment(SLURM) == (0, 2, 0, 1, "tcp://host3:20007")
    assert read_environment({**SLURM, "MASTER_PORT": "5", "MASTER_ADDR": "a"})[-1] == "tcp://a:5"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"MASTER_PORT": "http"}, "MASTER_PORT: expected a whole number, got 'http'"),
        ({"MASTER_PORT": "99999999"}, "MASTER_PORT: expected a port from 0 to 65535, got 99999999"),
        ({"LOCAL_WORLD_SIZE": "0"}, "check LOCAL_RANK and LOCAL_WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "check LOCAL_RANK and LOCAL_WORLD_SIZE"),
    ],
)
def test_variables_that_make_no_sense_are_named(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_environment({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n[1-8]"}, 8),
        ({"SLURM_NTASKS": "8"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
    ],
)
def test_the_job_in_the_environment_is_found(environment: dict[str, str], ranks: int | None) -> None:
    assert job_in_environment(environment) == ranks
