"""Runs programs on the hosts: the probe of the links, and torchrun's agents with the ranks of one experiment."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from paceline.bench.network.hosts import INTERFACE, Hosts, address
from paceline.bench.network.rank import Job
from paceline.launch.cores import threads_per_rank

PORT = 29500
POLL_SECONDS = 0.05
TAIL_LINES = 30
PROBE_SECONDS = 0.25


class JobFailed(RuntimeError):
    """A program on a host failed; the message ends with what it wrote last."""


@dataclass(frozen=True)
class Link:
    """What the links between the hosts carry, the slowest of them, measured with plain TCP sockets."""

    rate: float
    """Bytes of payload a second, each way at the same time."""
    round_trip: float
    """Seconds."""


def measure_link(hosts: Hosts, gbit: float) -> Link:
    """Measures the links, which were made to carry `gbit` Gbit/s.

    Raises:
        JobFailed: A probe failed.
    """
    size = round(gbit * 1e9 / 8 * PROBE_SECONDS)
    program = [sys.executable, "-m", "paceline.bench.network.probe"]
    probes = [
        hosts.start(host, [*program, str(host), str(hosts.count), str(size)], _environment(), stderr=subprocess.PIPE)
        for host in range(hosts.count)
    ]
    found = []
    for host, probe in enumerate(probes):
        out, err = probe.communicate()
        if probe.returncode:
            raise JobFailed(f"host {host}: the probe of its links failed:\n{err.decode(errors='replace')}")
        found.append(json.loads(out))
    return Link(size / max(one["seconds"] for one in found), max(one["round_trip"] for one in found))


def run_job(hosts: Hosts, job: Job, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs the ranks of `job` under torchrun, an agent a host.

    Args:
        hosts: Fresh ones; after a failure they are of no more use.
        job: What to run.
        show: Gets a line now and then.

    Returns:
        What rank 0 found; see `network.rank`.

    Raises:
        JobFailed: A rank or agent ended with an error.
    """
    cores = str(threads_per_rank(0, hosts.count * job.ranks_per_host))
    environment = {**_environment(), "OMP_NUM_THREADS": cores, "GLOO_SOCKET_IFNAME": INTERFACE}
    with ExitStack() as stack:
        # Files without a name, so that a kill leaves none.
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(hosts.count)]
        agents = []
        for host, log in enumerate(logs):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts.count)]
            command += ["--nproc-per-node", str(job.ranks_per_host), "--node-rank", str(host)]
            command += ["--master-addr", address(0), "--master-port", str(PORT), "--local-addr", address(host)]
            command += ["-m", "paceline.bench.network.rank", json.dumps(asdict(job))]
            agents.append(hosts.start(host, command, environment, subprocess.PIPE if host == 0 else log, log))
        results: list[dict[str, Any]] = []
        assert agents[0].stdout is not None
        reader = threading.Thread(target=_read, args=(agents[0].stdout, results, show), daemon=True)
        reader.start()
        while any(agent.poll() is None for agent in agents) and not any(agent.returncode for agent in agents):
            time.sleep(POLL_SECONDS)
        if any(agent.returncode for agent in agents):
            failed = [host for host, agent in enumerate(agents) if agent.returncode]
            hosts.close()
            for agent in agents:
                agent.wait()
            raise JobFailed("\n".join([f"{job.experiment} failed", *(_tail(host, logs[host]) for host in failed)]))
        reader.join()
        return results


def _tail(host: int, log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return "\n".join([f"host {host}:", *lines[-TAIL_LINES:]])


def _read(stream: IO[bytes], results: list[dict[str, Any]], show: Callable[[str], None]) -> None:
    for line in stream:
        if not line.startswith(b"{"):
            # A library's, not ours.
            show(line.decode(errors="replace").rstrip())
            continue
        message = json.loads(line)
        if "progress" in message:
            show(message["progress"])
        else:
            results.append(message)


def _environment() -> dict[str, str]:
    """Lets programs import what this one does: the folder it was started in is searched if it was for this one."""
    run_as_module = Path(sys.argv[0]).name == "__main__.py"
    return {} if run_as_module else {"PYTHONSAFEPATH": "1"}
