"""What the environment of a launcher says: this process's rank, and where ranks meet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.core.errors import UserError

JOINING = "PACELINE_JOINING_SECONDS"
"""Names the seconds for which ranks wait for each other to join, where all are known to be there."""


OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PACELINE_RENDEZVOUS",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which a process is a rank of a job; one that starts a job of its own inherits none of them."""


def read_environment(env: Mapping[str, str]) -> tuple[int, int, int, int, str]:
    """Reads (rank, world size, local rank, local world size, rendezvous) from a launcher's variables.

    Raises:
        UserError: They contradict each other, or some are missing.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK", 0)
        local_size = _number(env, "LOCAL_WORLD_SIZE", size if "PACELINE_RENDEZVOUS" in env else 1)
        method = env.get("PACELINE_RENDEZVOUS", "env://")
        if size > 1 and method == "env://" and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise UserError(
                f"WORLD_SIZE={size} but MASTER_ADDR and MASTER_PORT are not both set; start the job with torchrun, "
                "with `paceline train --workers N`, or set them on every rank"
            )
        if size > 1 and method == "env://":
            _port(env)
    elif "SLURM_PROCID" in env and "SLURM_NTASKS" in env and "SLURM_STEP_NODELIST" in env:
        rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS")
        local_rank = _number(env, "SLURM_LOCALID", 0)
        local_size = int(re.split(r"[(,]", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))[0])
        # A port from the job's number, as several jobs may share a host.
        port = _port(env) if "MASTER_PORT" in env else 20000 + _number(env, "SLURM_JOB_ID", 0) % 20000
        address = env.get("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
        method = f"tcp://{address}:{port}"
    else:
        return 0, 1, 0, 1, ""
    if not 0 <= rank < size:
        raise UserError(f"rank {rank} of {size}: expected 0 <= rank < world size; check RANK and WORLD_SIZE")
    if local_rank < 0 or local_size < 1:
        raise UserError(
            f"local rank {local_rank} of {local_size}: expected 0 <= local rank and at least 1 rank on this host; "
            "check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return rank, size, local_rank, local_size, method


def job_in_environment(environment: Mapping[str, str]) -> int | None:
    """Number of ranks of the job that torchrun, Slurm or this launcher put this process into; None outside of one."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and size in environment:
            if rank == "SLURM_PROCID" and "SLURM_STEP_NODELIST" not in environment:
                continue
            try:
                return int(environment[size])
            except ValueError:
                raise UserError(f"{size}: expected a whole number, got {environment[size]!r}") from None
    return None


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: "gpu[03-05,9],x" gives "gpu03"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + re.split(r"[-,\]]", rest)[0]


def _port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT")
    if not 0 <= port < 2**16:
        raise UserError(f"MASTER_PORT: expected a port from 0 to 65535, got {port}")
    return port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError:
        raise UserError(f"{name}: expected a whole number, got {value!r}") from None
