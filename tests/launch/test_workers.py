from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.launch.cores import threads_per_rank
from paceline.launch.failure import Failure, first_failure
from paceline.launch.worker import describe_failure
from paceline.launch.workers import GRACE_SECONDS
from tests.launch.jobs import job, nothing_is_left, wait_for


def test_ranks_get_the_variables_of_one_job(tmp_path: Path) -> None:
    body = """
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"
    Path(f"seen-{rank}").write_text(" ".join(os.environ[name] for name in names))
    assert os.environ["PACELINE_RENDEZVOUS"].startswith("file:///")
    """
    with job(tmp_path, body, workers=3) as started:
        status, _, _ = started.finish()
        assert status == 0
        nothing_is_left(tmp_path, started)
    threads = threads_per_rank(0, 3)
    assert [(tmp_path / f"seen-{k}").read_text() for k in range(3)] == [f"{k} {k} 3 3 {threads}" for k in range(3)]


def test_rank_0_has_the_screen_and_other_ranks_warnings_are_prefixed(tmp_path: Path) -> None:
    body = """
    print(f"out {rank}")
    print(f"first {rank}\\nsecond {rank}", end="", file=sys.stderr)
    """
    with job(tmp_path, body) as started:
        status, out, err = started.finish()
    assert (status, out) == (0, "out 0\n")
    assert "[rank 1] first 1\n" in err and "[rank 1] second 1\n" in err
    assert "first 0" in err and "[rank 0]" not in err


def test_the_first_traceback_stands_last_and_alone_when_a_worker_raises(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        Path("off").touch()
        raise ValueError("the third wheel came off")
    try:
        while not Path("off").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        raise ConnectionResetError("Connection reset by peer")
    finally:
        print("rank 0 noticed", file=sys.stderr)
    """
    with job(tmp_path, body) as started:
        began = time.monotonic()
        status, _, err = started.finish()
        assert time.monotonic() - began < 30
        nothing_is_left(tmp_path, started)
    assert status == 1
    assert err.rstrip().endswith("ValueError: the third wheel came off")
    assert err.count("Traceback") == 1
    assert "rank 1 of 2 failed" in err


def test_a_rank_that_lost_its_peer_is_not_the_first_failure_even_if_it_reports_earlier(tmp_path: Path) -> None:
    body = """
    if rank == 0:
        while not Path("deaf").exists():
            time.sleep(0.01)
        Path("lost").touch()
        raise RuntimeError("rank 1 is gone: rank 0 waited for it in all-reduce")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("deaf").touch()
    while not Path("lost").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    raise ZeroDivisionError("the cause")
    """
    with job(tmp_path, body) as started:
        status, _, err = started.finish()
    assert status == 1
    assert err.rstrip().endswith("ZeroDivisionError: the cause")


def test_a_worker_that_exits_ends_the_job_and_is_named(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        os._exit(7)
    time.sleep(60)
    """
    with job(tmp_path, body) as started:
        began = time.monotonic()
        status, _, err = started.finish()
        assert time.monotonic() - began < 30
        nothing_is_left(tmp_path, started)
    assert status == 7
    assert "rank 1 of 2 failed" in err and "exited with status 7" in err


def test_a_killed_worker_is_named_in_words_and_takes_deaf_ones_with_it(tmp_path: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("ready")
    time.sleep(60)
    """
    with job(tmp_path, body, workers=3) as started:
        wait_for(started, *(tmp_path / f"ready-{rank}" for rank in range(3)))
        killed = time.monotonic()
        os.kill(started.rank(1), signal.SIGKILL)
        status, _, err = started.finish()
        assert GRACE_SECONDS <= time.monotonic() - killed < 30
        nothing_is_left(tmp_path, started)
    assert status == 128 + signal.SIGKILL
    assert "rank 1 of 3 failed" in err and "SIGKILL" in err and "killed from outside" in err and "memory" in err


def test_a_users_mistake_is_one_message_without_a_traceback(tmp_path: Path) -> None:
    body = """
    raise UserError("the file notes.txt is empty: name another one")
    """
    with job(tmp_path, body, workers=3) as started:
        status, _, err = started.finish()
    assert status == 2
    assert [line for line in err.splitlines() if not line.startswith("warning")] == [
        "paceline: error: the file notes.txt is empty: name another one"
    ]


def test_kill_9_of_the_launcher_ends_workers_in_a_second_and_the_next_launch_cleans_up(tmp_path: Path) -> None:
    with job(tmp_path, "note('ready'); time.sleep(60)") as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        started.process.send_signal(signal.SIGKILL)
        started.wait_until_gone(20)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    with job(tmp_path, "pass") as again:
        assert again.finish()[0] == 0
        nothing_is_left(tmp_path, again)


def test_a_running_launch_keeps_its_folder_when_another_cleans_up(tmp_path: Path) -> None:
    with job(tmp_path, "note('ready'); time.sleep(60)") as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        (folder,) = (tmp_path / "tmp").iterdir()
        with job(tmp_path, "pass") as other:
            assert other.finish()[0] == 0
        assert folder.exists()


def test_what_others_put_into_the_temporary_folder_holds_nobody_up(tmp_path: Path) -> None:
    """A pipe is opened only when somebody writes to it, and a link may lead anywhere."""
    (tmp_path / "tmp" / "paceline-job-pipe").mkdir(parents=True)
    os.mkfifo(tmp_path / "tmp" / "paceline-job-pipe" / "lock")
    os.mkfifo(tmp_path / "tmp" / "paceline-job-itself")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").touch()
    (tmp_path / "tmp" / "paceline-job-link").symlink_to(tmp_path / "mine")
    with job(tmp_path, "pass") as started:
        assert started.finish()[0] == 0
    assert (tmp_path / "mine" / "lock").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_folders_of_other_users_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "tmp" / "paceline-job-theirs"
    theirs.mkdir(parents=True)
    (theirs / "lock").touch()
    os.chown(theirs, 12345, 12345)
    with job(tmp_path, "pass") as started:
        assert started.finish()[0] == 0
    assert theirs.exists()


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    body = """
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if rank == 1:
        raise ValueError("over")
    time.sleep(60)
    """
    with job(tmp_path, body) as started:
        assert started.finish()[0] == 1
        started.wait_until_gone(20)


def test_more_workers_than_cores_is_a_warning(tmp_path: Path) -> None:
    workers = len(os.sched_getaffinity(0)) + 1
    with job(tmp_path, "pass", workers=workers) as started:
        status, _, err = started.finish()
    assert status == 0
    assert f"warning: {workers} workers" in err


def test_the_first_failure_is_the_earliest_that_was_nobodys_fault() -> None:
    lost = Failure(0, 1.0, 1, "reset", peer_lost=True)
    cause = Failure(1, 2.0, 1, "cause")
    later = Failure(2, 3.0, 1, "later")
    assert first_failure([later, lost, cause]) is cause
    assert first_failure([lost]) is lost


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3421"), True),
        (RuntimeError("rank 1 is gone: rank 0 waited for it in call 7"), True),
        (RuntimeError("rank 1 gave up: ValueError: a broken batch"), True),
        (BrokenPipeError(32, "Broken pipe"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection reset by peer"), False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_ones_own(error: Exception, lost: bool) -> None:
    assert describe_failure(error, 0).peer_lost is lost
