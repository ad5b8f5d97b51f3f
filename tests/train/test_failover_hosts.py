"""Trainings on two hosts, in network namespaces with memory of their own, of which one is lost and comes again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench.network.hosts import FOLDER, INTERFACE, Hosts, NetworkUnavailable, address
from paceline.launch.seat import SEAT
from paceline.launch.worker import FORKS, told
from tests.ranks import RankPool
from tests.train.processes import PATIENCE, metrics, paceline, program, trained, wait_for_step
from tests.train.test_failover import jobs, seated, wait_for_job
from tests.train.test_resume import curve

MARK = "PACELINE_TEST_HOST"
OWN_MEMORY = f'mount -t tmpfs host {FOLDER} && exec "$@"'
FLAGS = ("--log.every", "1", "--log.validate-every", "0", "--log.validate-batches", "1", "--steps", "100000")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        made = Hosts(2, 1.0)
    except NetworkUnavailable as error:
        pytest.skip(f"making hosts {error}")
    with made:
        yield made


class Launchers:
    """The same command on each host."""

    def __init__(self, hosts: Hosts, folder: Path, flags: list[str]) -> None:
        self.hosts, self.folder, self.run = hosts, folder, folder / "run"
        self.command = paceline("train", *flags, "--folder", str(self.run))
        self.mark = uuid.uuid4().hex
        self.started = [self.start(host) for host in range(hosts.count)]

    def start(self, host: int) -> subprocess.Popen[bytes]:
        place = {"RANK": host, "WORLD_SIZE": self.hosts.count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        names = {
            "MASTER_ADDR": address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            MARK: f"{self.mark}-{host}",
        }
        environment = {key: str(value) for key, value in {**place, **names}.items()}
        command = ["sh", "-c", OWN_MEMORY, "sh", *self.command]
        with (self.folder / f"said-{host}").open("ab") as log:
            return self.hosts.start(host, command, environment, stdout=log, stderr=log)

    def processes(self, host: int, workers: bool = False) -> list[int]:
        """Processes of a host, or its workers alone."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environment = told(int(entry.name)) if entry.name.isdigit() else {}
            except OSError:
                continue
            if environment.get(MARK) == f"{self.mark}-{host}" and (not workers or SEAT in environment):
                found.append(int(entry.name))
        return found

    def interrupt(self, host: int) -> None:
        """Ctrl-C for the launcher: no worker nor what these are forked from, nor what entered the namespaces for it."""
        others = (pid for pid in self.processes(host) if told(pid).keys().isdisjoint({FORKS, SEAT}))
        (launcher,) = (pid for pid in others if "python" in os.readlink(f"/proc/{pid}/exe"))
        os.kill(launcher, signal.SIGINT)

    def kill(self, host: int) -> None:
        for pid in self.processes(host):
            os.kill(pid, signal.SIGKILL)

    def link(self, way: str) -> None:
        assert self.hosts.start(1, ["ip", "link", "set", INTERFACE, way]).wait() == 0

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(int(line["step"]) >= step for line in metrics(self.run) if "train/loss" in line))

    def wait_for_jobs(self, count: int) -> list[tuple[int, int]]:
        self.wait_until(lambda: len(jobs(self.run)) >= count)
        return jobs(self.run)

    def wait_until(self, holds) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + PATIENCE
        while not ((self.run / "metrics.jsonl").exists() and holds()):
            assert time.monotonic() < deadline and self.started[0].poll() is None, self.said()
            time.sleep(0.05)

    def said(self, host: int | None = None) -> str:
        wanted = range(self.hosts.count) if host is None else [host]
        lines = [line for each in wanted for line in (self.folder / f"said-{each}").read_text().splitlines()]
        return "\n".join(line for line in lines if "tokens/s" not in line)

    def end(self) -> list[int]:
        return [started.wait(PATIENCE) for started in self.started]


@pytest.mark.full
def test_the_other_host_goes_on_from_its_memory_and_with_both_when_it_is_there_again(
    hosts: Hosts, nano: list[str], tmp_path: Path
) -> None:
    job = Launchers(hosts, tmp_path, [*nano, *FLAGS, "--checkpoint.every", "0", "--workers", "1", "--min-workers", "1"])
    job.wait_for_step(5)
    job.kill(1)
    ((ranks, first), *_) = job.wait_for_jobs(1)
    assert ranks == 1 and first >= 5
    job.wait_for_step(first + 5)
    job.started[1].wait()
    job.started[1] = job.start(1)
    (_, (again, second), *_) = job.wait_for_jobs(2)
    # What it goes on with came over the network: its memory is its own.
    assert again == 2 and second > first
    job.wait_for_step(second + 5)
    job.interrupt(0)
    assert job.end() == [130, 130], job.said()
    steps = [int(line["step"]) for line in metrics(job.run) if "train/loss" in line]
    assert sorted({*steps, first, second}) == list(range(1, max(steps) + 1))
    said = job.said(0)
    assert "rank 1 of 2 is lost. Its host 1 of 2 is gone or cut off." in said
    assert f"1 rank goes on after step {first:,}, from memory" in said
    assert "host 1 of 2 is there again" in said and f"2 ranks go on after step {second:,}, from memory" in said
    assert not job.processes(0) and not job.processes(1)


@pytest.mark.full
def test_a_host_that_is_cut_off_ends_its_workers_and_joins_again_when_the_link_is_back(
    hosts: Hosts, nano: list[str], tmp_path: Path
) -> None:
    job = Launchers(hosts, tmp_path, [*nano, *FLAGS, "--checkpoint.every", "0", "--workers", "1", "--min-workers", "1"])
    job.wait_for_step(5)
    (worker,) = job.processes(1, workers=True)
    job.link("down")
    # Nothing closes the connections: the launcher tells the rank that waits at them.
    assert job.wait_for_jobs(1)[0][0] == 1 and worker not in job.processes(1)
    job.link("up")
    assert job.wait_for_jobs(2)[1][0] == 2
    job.wait_for_step(job.wait_for_jobs(2)[1][1] + 5)
    job.interrupt(1)
    assert job.end() == [130, 130], job.said()
    steps = [int(line["step"]) for line in metrics(job.run) if "train/loss" in line]
    assert sorted({*steps, *(step for _, step in jobs(job.run))}) == list(range(1, max(steps) + 1))
    assert "host 0 is gone or cut off: the workers here end, as others go on without them" in job.said(1)


@pytest.mark.full
@pytest.mark.parametrize(("zero", "memory"), [("0", True), ("3", False)])
def test_spares_of_a_host_take_the_places_of_anothers_workers(
    hosts: Hosts, ranks: RankPool, nano: list[str], tmp_path: Path, zero: str, memory: bool
) -> None:
    flags = [*nano, *FLAGS[:-1], "80", "--strategy.zero", zero, "--checkpoint.every", "10"]
    assert trained(ranks, 2, tmp_path, [*flags, "--folder", "undisturbed"])[0] == 0
    job = Launchers(hosts, tmp_path, [*flags, "--workers", "1", "--spares", "1"])
    job.wait_for_step(15)
    job.kill(1)
    assert job.started[0].wait(PATIENCE) == 0, job.said()
    ((count, step), *_) = jobs(job.run)
    assert count == 2 and (step >= 15 if memory else step % 10 == 0)
    found, expected = curve(job.run), curve(tmp_path / "undisturbed")
    assert set(found) >= set(expected) - {step}
    for at, figures in found.items():
        assert figures == pytest.approx(expected[at], rel=2e-3), at


@pytest.mark.full
def test_torchrun_starts_a_launcher_on_each_host(nano: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    agent += ["--rdzv-endpoint", endpoint, "--rdzv-id", "hosts", "--local-addr", "127.0.0.1", "-m", "paceline"]
    flags = [*nano, *FLAGS, "--workers", "1", "--min-workers", "2", "--checkpoint.every", "0", "--folder", "run"]
    with contextlib.ExitStack() as stack:
        command = [sys.executable, *agent, "train", *flags]
        first, second = (stack.enter_context(program(command, tmp_path)) for _ in range(2))
        wait_for_step(first, tmp_path / "run", 5)
        os.kill(seated(second)[0], signal.SIGKILL)
        wait_for_job(first, tmp_path / "run", 1)
        wait_for_step(first, tmp_path / "run", jobs(tmp_path / "run")[0][1] + 5)
        second.process.send_signal(signal.SIGTERM)
        ends = [each.finish() for each in (first, second)]
        assert not first.alive() and not second.alive()
    assert jobs(tmp_path / "run")[0][0] == 2
    steps = [int(line["step"]) for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert sorted({*steps, jobs(tmp_path / "run")[0][1]}) == list(range(1, max(steps) + 1)), ends
    assert (tmp_path / "run" / "checkpoints" / f"step-{max(steps):08d}").is_dir(), ends
