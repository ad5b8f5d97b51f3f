"""Jobs of workers without torch that lose some of them, and go on."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from paceline.launch.members import MOST_FRUITLESS
from paceline.launch.replacing import MEMORY
from tests.launch.jobs import nothing_is_left, wait_for
from tests.train.processes import Program, new_in_shared_memory, program

WORKER = """
import os, signal, sys, time
from pathlib import Path
from paceline.launch.seat import Seat
from paceline.launch.stop import StopRequest
from paceline.launch.worker import FORKS, run_worker
if FORKS in os.environ:
    from paceline.launch.forking import become_worker
    become_worker()

def work():
    seat = Seat.from_environment()
    # Stands for all that a rank remembers between two jobs.
    mine = []
    with StopRequest() as stop:
        while (place := seat.take_place(lambda: Path(f"warm-{os.getpid()}").touch())) is not None:
            job = f"job-{place.epoch}"
            mine.append(place.epoch)
            said = f"{place.rank} of {place.world_size} knows {mine} {place.work!r} {os.environ['RANK']}"
            if Path("planned").exists():
                seat.has_planned({"groups": 2})
            Path(f"{job}-{place.rank}.new").write_text(f"{os.getpid()} {said}")
            Path(f"{job}-{place.rank}.new").rename(f"{job}-{place.rank}")
            while not Path("over").exists() and not Path(f"{job}-broken").exists():
                time.sleep(0.01)
                if Path("stepping").exists():
                    seat.has_stepped("the work")
                if stop.received:
                    return 128 + stop.received
                if Path("raises").exists() and place.rank == 1:
                    raise ValueError("a mistake")
                if seat.asks_to_leave():
                    break
            if Path("over").exists():
                print(f"rank {place.rank} is done")
                return 0
    return 0

sys.exit(run_worker(work))
"""
LAUNCHER = """
import sys
from paceline.launch import replacing
from paceline.launch.process import Command
replacing.SILENT_SECONDS = 30.0
workers, least, spares = map(int, sys.argv[1:])
strategy = {"groups": 1}
fits = lambda ranks: ranks % strategy["groups"] == 0
command = Command([sys.executable, "worker.py"])
sys.exit(replacing.launch_replacing(command, workers, least, spares, 0, fits, strategy.update))
"""


def job(folder: Path, workers: int, least: int, spares: int):  # type: ignore[no-untyped-def]
    (folder / "worker.py").write_text(WORKER)
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "tmp").mkdir()
    command = [sys.executable, "launcher.py", str(workers), str(least), str(spares)]
    return program(command, folder, {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])})


def ranks(started: Program, folder: Path, epoch: int, size: int) -> list[tuple[int, str]]:
    """Process number of each rank of a job, and what it says."""
    files = [folder / f"job-{epoch}-{rank}" for rank in range(size)]
    wait_for(started, *files)
    found = [file.read_text().split(" ", 1) for file in files]
    return [(int(pid), said) for pid, said in found]


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    before = set(os.listdir(MEMORY))
    with job(tmp_path, 2, 2, 1) as started:
        (first, _), (other, _) = ranks(started, tmp_path, 0, 2)
        (tmp_path / "stepping").touch()
        os.kill(first, signal.SIGKILL)
        (tmp_path / "job-0-broken").touch()
        (zero, remembers), (one, new) = ranks(started, tmp_path, 1, 2)
        assert zero == other and remembers.startswith("0 of 2 knows [0, 1]")
        assert one not in (first, other) and new.startswith("1 of 2 knows [1]")
        assert (tmp_path / f"warm-{one}").exists() and not (tmp_path / f"warm-{zero}").exists()
        (tmp_path / "over").touch()
        status, out, err = started.finish()
        assert status == 0, err
        # It was rank 1, whose stdout goes nowhere, and has the screen now.
        assert out == "rank 0 is done\n"
        assert err.startswith("rank 0 of 2 is lost. Signal 9 (SIGKILL) ended it: it was killed from outside.\n")
        nothing_is_left(tmp_path, started)
    assert not new_in_shared_memory(before)


def test_a_job_shrinks_and_grows_again_at_the_end_of_a_step(tmp_path: Path) -> None:
    with job(tmp_path, 3, 1, 0) as started:
        pids = [pid for pid, _ in ranks(started, tmp_path, 0, 3)]
        (tmp_path / "stepping").touch()
        os.kill(pids[1], signal.SIGKILL)
        (tmp_path / "job-0-broken").touch()
        assert [pid for pid, _ in ranks(started, tmp_path, 1, 2)] == [pids[0], pids[2]]
        *same, (new, said) = ranks(started, tmp_path, 2, 3)
        assert [pid for pid, _ in same] == [pids[0], pids[2]]
        assert new not in pids and said == "2 of 3 knows [2] 'the work' 2"
        (tmp_path / "over").touch()
        assert started.finish()[0] == 0
        nothing_is_left(tmp_path, started)


def test_successors_are_counted_by_the_strategy_that_ranks_have_planned(tmp_path: Path) -> None:
    (tmp_path / "planned").touch()
    with job(tmp_path, 4, 2, 0) as started:
        pids = [pid for pid, _ in ranks(started, tmp_path, 0, 4)]
        (tmp_path / "stepping").touch()
        os.kill(pids[3], signal.SIGKILL)
        (tmp_path / "job-0-broken").touch()
        # Three are left, and groups have two.
        assert [pid for pid, _ in ranks(started, tmp_path, 1, 2)] == pids[:2]
        assert {pid for pid, _ in ranks(started, tmp_path, 2, 4)} > set(pids[:3])
        (tmp_path / "over").touch()
        assert started.finish()[0] == 0
        nothing_is_left(tmp_path, started)


def test_all_ranks_may_be_lost_at_once(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, 0) as started:
        pids = [pid for pid, _ in ranks(started, tmp_path, 0, 2)]
        (tmp_path / "stepping").touch()
        wait_for(started, tmp_path / "job-0-0")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ((new, _),) = ranks(started, tmp_path, 1, 1)
        assert new not in pids
        (tmp_path / "over").touch()
        assert started.finish()[0] == 0


@pytest.mark.full
def test_a_stopped_rank_is_ended_and_replaced(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, 0) as started:
        pids = [pid for pid, _ in ranks(started, tmp_path, 0, 2)]
        os.kill(pids[0], signal.SIGSTOP)
        (tmp_path / "job-0-broken").touch()
        ((left, _),) = ranks(started, tmp_path, 1, 1)
        assert left == pids[1]
        (tmp_path / "over").touch()
        assert started.finish()[0] == 0


def test_an_exception_ends_the_job(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, 1) as started:
        ranks(started, tmp_path, 0, 2)
        (tmp_path / "raises").touch()
        status, _, err = started.finish()
        assert status == 1
        assert err.rstrip().endswith("ValueError: a mistake") and "rank 1 of 2 failed" in err
        assert "lost" not in err
        nothing_is_left(tmp_path, started)


@pytest.mark.full
def test_too_few_ranks_end_the_job_with_what_was_lost(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1, 0) as started:
        # Each successor is lost, too, before it has done a step.
        for epoch in range(MOST_FRUITLESS):
            ((_, said),) = ranks(started, tmp_path, epoch, 1)
            for pid, _ in ranks(started, tmp_path, epoch, int(said.split()[2])):
                os.kill(pid, signal.SIGKILL)
        status, _, err = started.finish()
        assert status == 128 + signal.SIGKILL
        assert "Signal 9 (SIGKILL) ended it: it was killed from outside." in err.splitlines()[-2]
        nothing_is_left(tmp_path, started)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_stop_ends_ranks_and_those_that_wait(tmp_path: Path, number: signal.Signals) -> None:
    with job(tmp_path, 2, 2, 1) as started:
        pids = [pid for pid, _ in ranks(started, tmp_path, 0, 2)]
        os.kill(pids[0], signal.SIGKILL)
        (tmp_path / "job-0-broken").touch()
        ranks(started, tmp_path, 1, 2)
        started.process.send_signal(number)
        status, _, err = started.finish()
        assert status == 128 + number, err
        nothing_is_left(tmp_path, started)
