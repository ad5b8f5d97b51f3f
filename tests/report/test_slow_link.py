"""A run between hosts whose link is slow: communication binds it, the link is known as slow, and no rank is blamed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.bench.network.hosts import INTERFACE, Hosts, NetworkUnavailable, address
from paceline.report.run import read_run
from paceline.report.steps import straggler
from paceline.report.summary import verdict
from tests.train.processes import PATIENCE, paceline

GBIT = 0.008


@pytest.fixture(scope="module")
def slowed(nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two hosts with a rank each."""
    run = tmp_path_factory.mktemp("slowed") / "run"
    flags = ["--steps", "6", "--log.every", "2", "--log.events-every", "1", "--strategy.bucket-mb", "0.2"]
    command = paceline("train", *nano, *flags, "--log.validate-batches-at-end", "1", "--folder", str(run))
    try:
        made = Hosts(2, GBIT)
    except NetworkUnavailable as error:
        pytest.skip(f"making hosts {error}")
    with made as hosts:
        started = []
        for host in range(2):
            place = {"RANK": host, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
            names = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE}
            environment = {key: str(value) for key, value in {**place, **names}.items()}
            started.append(hosts.start(host, command, environment, subprocess.PIPE, subprocess.STDOUT))
        said = [each.communicate(timeout=PATIENCE)[0].decode() for each in started]
        assert not any(each.returncode for each in started), said
    return run


@pytest.mark.full
def test_the_link_is_what_binds(slowed: Path) -> None:
    run = read_run(slowed)
    assert verdict(run).startswith("Communication binds this run")
    # Whatever else runs on this machine may hold one rank up a little.
    slow = straggler(run.steps)
    assert slow is None or slow.of_step < 0.1
    assert run.link is not None
    # Collectives of so few bytes profit from what the link lets through at once, and from what the first rank sent
    # before the last had come. Within a host a link carries a hundred times as much.
    assert 0.5 < run.link.bandwidth / (GBIT * 1e9 / 8) < 4
    assert "It would help most if collectives took no time" in verdict(run)
