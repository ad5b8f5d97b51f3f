"""Workers that are forked from a process that has imported what they need."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from paceline.launch.forking import GPUS
from tests.launch.jobs import job, nothing_is_left, wait_for

pytestmark = pytest.mark.skipif(any(map(os.path.exists, GPUS)), reason="workers are not forked on a host with GPUs")
COUNTED = "open('imported', 'a').write('once\\n')\n"


def imports(folder: Path, body: str) -> list[str]:
    (folder / "needed.py").write_text(body)
    return ["needed"]


def test_workers_share_one_import_and_are_told_what_others_are(tmp_path: Path) -> None:
    body = """
    import needed
    print(f"out {rank}", os.getppid() == int(Path("launcher").read_text()), os.getpgid(0) == os.getpid())
    print(f"err {rank}", file=sys.stderr)
    Path(f"seen-{rank}").write_text(" ".join(os.environ[n] for n in ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")))
    assert not {"PACELINE_FORKS", "PACELINE_LAUNCHER", "PACELINE_FAILURE_FILE"} & os.environ.keys()
    assert sys.stdin.read() == ""
    assert os.readlink("/proc/self/fd/1") == "/dev/null" or rank == 0
    """
    with job(tmp_path, body, 3, {"OMP_NUM_THREADS": "5"}, imports(tmp_path, COUNTED)) as started:
        (tmp_path / "launcher").write_text(str(started.process.pid))
        status, out, err = started.finish()
        nothing_is_left(tmp_path, started)
    assert (status, out) == (0, "out 0 True True\n"), err
    assert "[rank 1] err 1\n" in err and "[rank 2] err 2\n" in err and "err 0" in err
    assert (tmp_path / "imported").read_text() == "once\n"
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in range(3)] == ["3 0 5", "3 1 5", "3 2 5"]


def test_a_killed_worker_is_named_and_an_exception_is_told(tmp_path: Path) -> None:
    with job(tmp_path, "note('ready'); time.sleep(60)", imports=imports(tmp_path, COUNTED)) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        os.kill(started.rank(1), signal.SIGKILL)
        status, _, err = started.finish()
        nothing_is_left(tmp_path, started)
    assert status == 128 + signal.SIGKILL and "rank 1 of 2 failed" in err and "SIGKILL" in err
    with job(tmp_path, "assert rank == 0, 'the third wheel'", imports=["needed"]) as started:
        status, _, err = started.finish()
    assert status == 1 and "rank 1 of 2 failed" in err and err.rstrip().endswith("AssertionError: the third wheel")


def test_what_is_wrong_with_an_import_each_worker_meets(tmp_path: Path) -> None:
    with job(tmp_path, "import needed", imports=imports(tmp_path, "raise ImportError('half installed')")) as started:
        status, _, err = started.finish()
        nothing_is_left(tmp_path, started)
    assert status == 1 and err.rstrip().endswith("ImportError: half installed")


def test_a_stop_amid_the_import_ends_it(tmp_path: Path) -> None:
    slow = "import time; open('begun', 'w').close(); time.sleep(60)"
    with job(tmp_path, "import needed", imports=imports(tmp_path, slow)) as started:
        wait_for(started, tmp_path / "begun")
        sent = time.monotonic()
        started.process.send_signal(signal.SIGINT)
        status, _, err = started.finish()
        assert time.monotonic() - sent < 30
        nothing_is_left(tmp_path, started)
    assert status == 128 + signal.SIGINT and "stopping" in err and "Traceback" not in err


def test_workers_start_as_programs_when_what_they_are_forked_from_is_killed(tmp_path: Path) -> None:
    killed = "import os, signal; 'RANK' in os.environ or os.kill(os.getpid(), signal.SIGKILL)"
    with job(tmp_path, "import needed; print('there')", imports=imports(tmp_path, killed)) as started:
        assert started.finish()[:2] == (0, "there\n")
        nothing_is_left(tmp_path, started)


def test_kill_9_of_the_launcher_ends_all(tmp_path: Path) -> None:
    slow = "import time; open('begun', 'w').close(); time.sleep(60)"
    with job(tmp_path, "pass", imports=imports(tmp_path, slow)) as started:
        wait_for(started, tmp_path / "begun")
        started.process.send_signal(signal.SIGKILL)
        started.wait_until_gone(20)
    with job(tmp_path, "note('ready'); time.sleep(60)", imports=imports(tmp_path, COUNTED)) as started:
        wait_for(started, tmp_path / "ready-0", tmp_path / "ready-1")
        started.process.send_signal(signal.SIGKILL)
        started.wait_until_gone(20)
