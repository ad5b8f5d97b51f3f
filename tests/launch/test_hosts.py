"""Launchers of several hosts, all on this one, with workers without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.launch.jobs import nothing_is_left
from tests.launch.test_replacing import WORKER
from tests.quick import full
from tests.train.processes import PATIENCE, Program, program

LAUNCHER = """
import os, sys
from paceline.launch import following, host_line, host_meeting, leading
from paceline.launch.process import Command
workers, least, spares, cut_off = map(int, sys.argv[1:5])
host_meeting.CUT_OFF_SECONDS, host_meeting.FENCED_SECONDS = cut_off, 0.6 * cut_off
following.PATIENT_SECONDS = 0.5
meeting = host_meeting.HostMeeting(os.environ)
command = Command([sys.executable, "worker.py"], tuple(sys.argv[5:]))
if meeting.host:
    sys.exit(following.follow(meeting, command, workers, spares, 1))
sys.exit(leading.lead(meeting, command, workers, least, spares, 1, lambda ranks: True, print))
"""


class Job:
    """The launchers."""

    def __init__(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        hosts: int,
        sizes: tuple[int, int, int, int],
        imports: Sequence[str] = (),
        late: float = 0.0,
    ) -> None:
        self.folder, self.hosts, self._stack = folder, hosts, stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        (folder / "worker.py").write_text(WORKER)
        (folder / "launcher.py").write_text(LAUNCHER)
        (folder / "tmp").mkdir()
        self._sizes, self._imports = sizes, imports
        self.launchers = [self.start(host) for host in range(hosts - 1)]
        time.sleep(late)
        self.launchers.append(self.start(hosts - 1))

    def start(self, host: int, sizes: tuple[int, ...] = ()) -> Program:
        command = [sys.executable, "launcher.py", *map(str, sizes or self._sizes), *self._imports]
        place = {"RANK": host, "WORLD_SIZE": self.hosts, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port}
        paths = {"TMPDIR": self.folder / "tmp", "PYTHONPATH": Path(__file__).parents[2]}
        environment = {key: str(value) for key, value in {**place, **paths, "TEST_HOST": host}.items()}
        return self._stack.enter_context(program(command, self.folder, environment))

    def ranks(self, epoch: int, size: int) -> list[tuple[int, str]]:
        """Process number of each rank of a job, and what it says."""
        files = [self.folder / f"job-{epoch}-{rank}" for rank in range(size)]
        self.wait_until(lambda: all(file.exists() for file in files))
        found = [file.read_text().split(" ", 1) for file in files]
        return [(int(pid), said) for pid, said in found]

    def wait_until(self, holds) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + PATIENCE
        while not holds():
            # A launcher that has ended did so for what it says: such as a port that another program has taken since.
            over = [launcher.process.poll() for launcher in self.launchers]
            assert time.monotonic() < deadline, f"launchers have ended with {over}"
            time.sleep(0.02)

    def host_of(self, pid: int) -> int:
        return next(host for host, launcher in enumerate(self.launchers) if pid in launcher.alive())

    def break_up(self, epoch: int) -> None:
        """Ranks notice that another one is gone, and leave."""
        (self.folder / f"job-{epoch}-broken").touch()

    def kill(self, host: int) -> None:
        self.launchers[host].process.kill()
        self.launchers[host].wait_until_gone(PATIENCE)

    def end(self) -> list[tuple[int, str, str]]:
        (self.folder / "over").touch()
        return [launcher.finish() for launcher in self.launchers]


@pytest.fixture
def started(tmp_path: Path) -> Iterator:  # type: ignore[type-arg]
    with contextlib.ExitStack() as stack:
        yield lambda hosts, *sizes, **more: Job(tmp_path, stack, hosts, sizes, **more)


def test_the_job_goes_on_without_a_host_and_with_it_when_it_has_come_again(started, tmp_path: Path) -> None:
    job = started(2, 2, 2, 0, 10)
    pids = [pid for pid, _ in job.ranks(0, 4)]
    assert [job.host_of(pid) for pid in pids] == [0, 0, 1, 1]
    (tmp_path / "stepping").touch()
    job.kill(1)
    job.break_up(0)
    assert [pid for pid, _ in job.ranks(1, 2)] == pids[:2]
    job.launchers[1] = job.start(1)
    *same, (new, said), (other, _) = job.ranks(2, 4)
    assert [pid for pid, _ in same] == pids[:2]
    assert [job.host_of(pid) for pid in (new, other)] == [1, 1] and said == "2 of 4 knows [2] 'the work' 2"
    statuses = job.end()
    assert [status for status, _, _ in statuses] == [0, 0], statuses
    err = statuses[0][2]
    assert "rank 2 of 4 is lost. Its host 1 of 2 is gone or cut off." in err
    assert statuses[0][1] == "host 1 of 2 is there again\nrank 0 is done\n" and not statuses[1][1]
    for launcher in job.launchers:
        nothing_is_left(tmp_path, launcher)


@pytest.mark.full
@pytest.mark.parametrize("host", [0, full(1)])
def test_no_host_is_lost_while_a_launcher_waits_for_what_its_workers_import(started, tmp_path: Path, host: int) -> None:
    slow = f"import os, time\nif os.environ['TEST_HOST'] == '{host}':\n    time.sleep(6)\n"
    (tmp_path / "needed.py").write_text(slow)
    job = started(2, 1, 1, 0, 3, imports=["needed"])
    assert [job.host_of(pid) for pid, _ in job.ranks(0, 2)] == [0, 1]
    statuses = job.end()
    # On a busy machine host 1 may say that it waits for the launcher of host 0 to begin.
    assert [status for status, _, _ in statuses] == [0, 0] and not any("gone" in err for _, _, err in statuses), (
        statuses
    )


@pytest.mark.full
def test_a_host_that_came_early_stays_while_others_are_waited_for(started) -> None:
    job = started(3, 1, 1, 0, 3, late=6)
    assert [job.host_of(pid) for pid, _ in job.ranks(0, 3)] == [0, 1, 2]
    statuses = job.end()
    assert [status for status, _, _ in statuses] == [0] * 3 and not any("gone" in err for _, _, err in statuses)


@pytest.mark.full
def test_a_lost_worker_is_replaced_on_its_host_and_ranks_of_a_host_stay_together(started, tmp_path: Path) -> None:
    job = started(2, 1, 1, 1, 10)
    pids = [pid for pid, _ in job.ranks(0, 2)]
    (tmp_path / "stepping").touch()
    os.kill(pids[1], signal.SIGKILL)
    job.break_up(0)
    # Where both spares are still starting, one rank goes on alone first.
    job.wait_until(lambda: (tmp_path / "job-1-1").exists() or (tmp_path / "job-2-1").exists())
    first, second = (pid for pid, _ in job.ranks(1 if (tmp_path / "job-1-1").exists() else 2, 2))
    # A spare of either host: another worker is started where one was lost.
    assert first == pids[0] and second not in pids
    job.wait_until(lambda: sum(len(launcher.alive()) for launcher in job.launchers) == 2 + 4)
    statuses = job.end()
    assert [status for status, _, _ in statuses] == [0, 0], statuses


@pytest.mark.full
@pytest.mark.parametrize("host", [0, full(1)])
def test_an_exception_on_one_host_ends_all(started, tmp_path: Path, host: int) -> None:
    job = started(2, 1 + (host == 0), 1, 0, 10)
    job.ranks(0, 2)
    (tmp_path / "raises").touch()
    (one, _, told), (other, _, _) = [launcher.finish() for launcher in job.launchers]
    assert (one, other) == (1, 1) and told.rstrip().endswith("ValueError: a mistake"), told
    assert f"rank 1 of {2 * (1 + (host == 0))} failed" in told


@pytest.mark.full
@pytest.mark.parametrize("host", [0, 1])
def test_a_stop_on_one_host_stops_all(started, host: int) -> None:
    job = started(2, 1, 1, 0, 10)
    job.ranks(0, 2)
    job.launchers[host].process.send_signal(signal.SIGTERM)
    assert [launcher.finish()[0] for launcher in job.launchers] == [143, 143]


@pytest.mark.full
def test_workers_of_a_host_that_is_cut_off_are_ended_before_others_go_on(started, tmp_path: Path) -> None:
    job = started(2, 1, 1, 0, 5)
    (here, _), (there, _) = job.ranks(0, 2)
    (tmp_path / "stepping").touch()
    # Its worker goes on, as one does that is beyond a network which is gone.
    job.launchers[0].process.send_signal(signal.SIGSTOP)
    job.wait_until(lambda: there not in job.launchers[1].alive())
    assert here in job.launchers[0].alive()
    job.launchers[0].process.send_signal(signal.SIGCONT)
    job.break_up(0)
    assert job.ranks(1, 1)[0][0] == here
    assert next(pid for pid, _ in job.ranks(2, 2)) == here
    statuses = job.end()
    assert [status for status, _, _ in statuses] == [0, 0], statuses
    assert "host 0 is gone or cut off: the workers here end" in statuses[1][2]


@pytest.mark.full
def test_where_the_leading_host_is_lost_the_others_end_their_workers_and_follow_the_next(started) -> None:
    job = started(2, 1, 1, 0, 10)
    pids = [pid for pid, _ in job.ranks(0, 2)]
    job.kill(0)
    job.wait_until(lambda: pids[1] not in job.launchers[1].alive())
    for file in job.folder.glob("job-*"):
        file.unlink()
    job.launchers[0] = job.start(0)
    new = [pid for pid, _ in job.ranks(0, 2)]
    assert not set(new) & set(pids) and [job.host_of(pid) for pid in new] == [0, 1]
    assert [status for status, _, _ in job.end()] == [0, 0]


@pytest.mark.full
def test_fewer_than_half_of_the_hosts_do_not_go_on(started, tmp_path: Path) -> None:
    job = started(3, 1, 1, 0, 10)
    pids = [pid for pid, _ in job.ranks(0, 3)]
    (tmp_path / "stepping").touch()
    job.kill(2)
    job.break_up(0)
    assert [pid for pid, _ in job.ranks(1, 2)] == pids[:2]
    job.kill(1)
    status, _, err = job.launchers[0].finish()
    assert status == 137 and "fewer than half of the hosts are left" in err
    # What others went on after is no reason for the end.
    assert "rank 1 of 2 failed; the other workers were ended.\nIts host 1 of 3 is gone or cut off." in err


@pytest.mark.full
def test_a_launcher_that_waits_for_the_first_says_so_and_can_be_interrupted(started, tmp_path: Path) -> None:
    job = started(0, 1, 1, 0, 10)
    job.hosts = 2
    launcher = job.start(1)
    line = launcher.process.stderr.readline()
    assert line.startswith("host 1 of 2 waits for the launcher of host 0, at 127.0.0.1:")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.finish() == (130, "", "")
    nothing_is_left(tmp_path, launcher)


@pytest.mark.full
def test_a_port_that_another_program_has_is_said_with_what_to_do(started) -> None:
    job = started(0, 1, 1, 0, 10)
    job.hosts = 2
    with socket.create_server(("127.0.0.1", job._port)):
        status, _, err = job.start(0).finish()
    assert status == 1 and "set another MASTER_PORT on every host" in err


@pytest.mark.full
def test_another_number_of_workers_on_a_host_is_refused_there(started, tmp_path: Path) -> None:
    job = started(2, 1, 1, 0, 10)
    job.ranks(0, 2)
    (tmp_path / "stepping").touch()
    job.kill(1)
    job.break_up(0)
    job.ranks(1, 1)
    status, _, err = job.start(1, (2, 1, 1, 10)).finish()
    assert status != 0 and "host 0 was started with --workers 1 --spares 0, host 1 with --workers 2 --spares 1" in err
    job.launchers[1] = job.start(1)
    job.ranks(2, 2)
    assert [status for status, _, _ in job.end()] == [0, 0]
