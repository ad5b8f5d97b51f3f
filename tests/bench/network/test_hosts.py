from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from paceline.bench.network.hosts import Hosts, NetworkUnavailable
from paceline.bench.network.jobs import measure_link

MARK = "PACELINE_TEST_MARK"


@pytest.fixture(scope="module", autouse=True)
def needs_hosts() -> None:
    try:
        Hosts(2, 1.0).close()
    except NetworkUnavailable as error:
        pytest.skip(f"making hosts {error}")


def marked(mark: str) -> list[int]:
    """Processes, zombies apart, that were started with a mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def networks(processes: list[int]) -> set[str]:
    found = set()
    for process in processes:
        try:
            found.add(os.readlink(f"/proc/{process}/ns/net"))
        except OSError:
            continue
    return found


def everybody() -> list[int]:
    return [int(process.name) for process in Path("/proc").iterdir() if process.name.isdigit()]


def of_the_machine() -> list[str]:
    """Interfaces, their limits and named namespaces of this machine, as iproute2 shows them."""
    shown = (["ip", "link"], ["ip", "-br", "address"], ["tc", "qdisc"], ["ip", "netns"])
    return [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in shown]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
def test_links_carry_the_rate_that_was_asked_for_and_the_machine_is_left_alone(count: int) -> None:
    before = of_the_machine()
    with Hosts(count, 0.2) as hosts:
        # A busy machine only makes a link slower: the best of a few is what it carries.
        links = [measure_link(hosts, 0.2) for _ in range(3)]
        assert of_the_machine() == before
    assert max(link.rate for link in links) * 8e-9 == pytest.approx(0.2, rel=0.1)
    assert 0 < min(link.round_trip for link in links) < 0.05
    assert of_the_machine() == before


def test_hosts_have_ids_and_addresses_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "cat /proc/sys/kernel/random/boot_id; ip -o -4 address show eth0; pwd; echo $TMPDIR $EXTRA"
    with Hosts(2, 1.0) as hosts:
        started = [hosts.start(host, ["sh", "-c", script], {"EXTRA": "word"}) for host in range(2)]
        answers = [one.communicate()[0].decode().split("\n") for one in started]
    boots = {Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *(answer[0] for answer in answers)}
    assert len(boots) == 3
    for host, answer in enumerate(answers):
        assert f"10.77.0.{host + 1}/24" in answer[1]
        assert answer[2:4] == [str(tmp_path), "/dev/shm word"]


def test_closing_ends_what_runs_on_the_hosts() -> None:
    with Hosts(2, 1.0) as hosts:
        sleeping = hosts.start(1, ["sleep", "600"])
        assert sleeping.poll() is None
    assert sleeping.wait(10) != 0


PROGRAM = """
import time
from paceline.bench.network.hosts import Hosts
hosts = Hosts(3, 1.0)
for host in range(3):
    hosts.start(host, ["sh", "-c", "setsid sleep 600 & touch $TMPDIR/file; echo ready; sleep 600"]).stdout.readline()
print("ready", flush=True)
while True:  # a signal that comes just before a wait without end would be lost
    time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_command_ends(number: signal.Signals, tmp_path: Path) -> None:
    before, mark = of_the_machine(), uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        ours = networks([os.getpid()])
        theirs = networks(marked(mark)) - ours
        assert len(theirs) == 4, "the namespace that all is made in, and three hosts; nobody runs on the switch"
        assert len(marked(mark)) >= 1 + 2 + 3 * 3
        program.send_signal(number)
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert marked(mark) == []
    assert not networks(everybody()) & theirs
    assert not any(network in Path("/proc/self/mountinfo").read_text() for network in theirs)
    assert of_the_machine() == before
    assert list(tmp_path.iterdir()) == []
