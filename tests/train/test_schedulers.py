"""The files for Slurm and Kubernetes: a job that is told to stop saves, and goes on when it is started again.

Neither is here: Slurm's commands are stood in for by programs that treat ranks and signals as its manual says.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.processes import called, metrics, program, wait_for_step

EXAMPLES = Path(__file__).parents[2] / "examples"

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    del command[0]
task = {{"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}}
signal.signal(signal.SIGTERM, lambda *_: [rank.send_signal(signal.SIGTERM) for rank in ranks])
ranks = [
    subprocess.Popen(command, env={{**os.environ, **task, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""

COMMANDS = {
    "srun": SRUN,
    "scontrol": '#!/bin/sh\necho "$@" >> queue\n',
    "paceline": f'#!/bin/sh\nexec "{sys.executable}" -m paceline "$@"\n',
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script; what is queued again is written to the file queue."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": str(os.getpid())}


def batch(*flags: str) -> list[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return [bash, str(EXAMPLES / "slurm.sbatch"), *flags, "--log.every", "1", "--log.validate-batches", "1"]


@pytest.mark.full
def test_a_job_that_is_out_of_time_saves_queues_again_and_goes_on(
    nano: list[str], tmp_path: Path, slurm: dict[str, str]
) -> None:
    run = tmp_path / "runs" / slurm["SLURM_JOB_ID"]
    command = batch(*nano, "--steps", "100")
    with program(command, tmp_path, slurm) as started:
        wait_for_step(started, run, 3)
        started.process.send_signal(signal.SIGUSR1)
        status, out, err = started.finish()
        assert not started.alive()
    assert status == 143, err
    assert (tmp_path / "queue").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    done = max(int(line["step"]) for line in metrics(run))
    assert 3 <= done < 100
    with program(command, tmp_path, slurm) as started:
        status, out, err = started.finish()
    assert status == 0, err
    assert f"going on after step {done}" in out
    assert [int(line["step"]) for line in metrics(run) if "train/loss" in line] == list(range(1, 101))
    assert len((tmp_path / "queue").read_text().splitlines()) == 1


@pytest.mark.full
def test_a_job_that_fails_or_is_cancelled_is_not_queued_again(
    nano: list[str], tmp_path: Path, slurm: dict[str, str]
) -> None:
    with program(batch(*nano, "--strategy.zero", "5"), tmp_path, slurm) as started:
        assert started.finish()[0] == 2
    with program(batch(*nano, "--steps", "100000"), tmp_path, slurm) as started:
        wait_for_step(started, tmp_path / "runs" / slurm["SLURM_JOB_ID"], 3)
        for pid, environment in started.alive().items():
            # As scancel does: the ranks, not the script.
            if "SLURM_PROCID" in environment:
                os.kill(pid, signal.SIGTERM)
        assert started.finish()[0] == 143
    assert not (tmp_path / "queue").exists()


def test_what_kubernetes_starts_is_a_command_that_exists(nano: list[str], tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command: list[str] = container["command"]
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"]
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in command
    assert f"--nnodes={job['spec']['completions']}" in command
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in command
    settings = command[command.index("train") + 1 :]
    (tmp_path / "run.yaml").write_text("steps: 7\n")
    found = [str(tmp_path / "run.yaml") if value == "/data/run.yaml" else value for value in settings]
    status, out, err = called(tmp_path, "train", *found, *nano, "--print-config")
    assert (status, err) == (0, "") and "steps: 7" in out and "resume: auto" in out


@pytest.mark.full
def test_torchrun_starts_a_job_again_that_lost_a_rank(nano: list[str], tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    flags = [*nano, "--steps", "150", "--log.every", "1", "--log.validate-batches", "1", "--checkpoint.every", "10"]
    run = tmp_path / "first"
    with program([*agent, "-m", "paceline", "train", *flags, "--folder", "first", "--resume", "auto"], tmp_path) as job:
        wait_for_step(job, run, 21)
        os.kill(job.rank(1), signal.SIGKILL)
        status, out, err = job.finish()
    assert status == 0, err
    assert "going on after step" in out
    assert sorted({int(line["step"]) for line in metrics(run) if "train/loss" in line}) == list(range(1, 151))
