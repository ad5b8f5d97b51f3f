from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

import paceline as pl
from paceline.core.errors import UserError
from paceline.launch.pool import RankPool, RanksFailed
from tests.quick import full
from tests.train.processes import program

ROOT = Path(__file__).parents[2]


def job(word: str) -> tuple[int, int, int, str]:
    world = pl.init(device="cpu")
    return world.rank, world.world_size, os.getpid(), word


def ends(rank: int, how: str) -> str:
    if int(os.environ["RANK"]) == rank or rank < 0:
        if how == "user":
            raise UserError("give something else")
        if how == "raise":
            raise ValueError("no such thing")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    return "well"


def waits_in_vain(rank: int) -> None:
    pl.init(device="cpu")
    while int(os.environ["RANK"]) == rank or rank < 0:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, threads=1) as started:
        yield started


def processes(pool: RankPool) -> list[int]:
    return [pid for _, _, pid, _ in pool.run(job, "", limit=60)]


def test_ranks_form_one_job_and_are_kept(pool: RankPool) -> None:
    first, second = pool.run(job, "a", limit=60), pool.run(job, "b", limit=60)
    assert [(rank, size, word) for rank, size, _, word in first] == [(0, 2, "a"), (1, 2, "a")]
    assert [pid for _, _, pid, _ in first] == [pid for _, _, pid, _ in second]


@pytest.mark.full
def test_a_temporary_folder_with_any_name_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("b" * 90 + "?\n#%41")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with RankPool(2, threads=1) as started:
        assert [word for *_, word in started.run(job, "far down", limit=60)] == ["far down"] * 2


def test_what_every_rank_raises_alike_leaves_them_as_they_are(pool: RankPool) -> None:
    before = processes(pool)
    with pytest.raises(UserError, match=r"^give something else$"):
        pool.run(ends, -1, "user", limit=60)
    with pytest.raises(RanksFailed) as caught:
        pool.run(ends, -1, "raise", limit=60)
    assert caught.value.summary == "ValueError: no such thing"
    assert "in ends" in caught.value.failure.text
    assert processes(pool) == before


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "ValueError: no such thing"),
        ("exit", "SystemExit: 3"),
        ("die", "Signal 11 (SIGSEGV) ended it"),
    ],
)
def test_a_rank_that_fails_alone_is_named_and_all_start_anew(pool: RankPool, how: str, words: str) -> None:
    before = processes(pool)
    with pytest.raises(RanksFailed) as caught:
        pool.run(ends, 1, how, limit=60)
    assert words in caught.value.summary and caught.value.failure.rank == 1
    assert not set(processes(pool)) & set(before)


def test_ranks_that_all_die_start_anew_too(pool: RankPool) -> None:
    before = processes(pool)
    with pytest.raises(RanksFailed, match="Signal 11"):
        pool.run(ends, -1, "die", limit=60)
    assert not set(processes(pool)) & set(before)


@pytest.mark.parametrize(("rank", "who"), [(1, "rank 1"), (-1, "rank 0 and rank 1")])
def test_ranks_that_give_no_answer_are_ended_and_their_stacks_kept(pool: RankPool, rank: int, who: str) -> None:
    before = processes(pool)
    with pytest.raises(RanksFailed) as caught:
        pool.run(waits_in_vain, rank, limit=0.5)
    assert caught.value.summary == f"{who} gave no answer within 0.5 s"
    assert caught.value.failure.text.count("in waits_in_vain") == who.count("rank")
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert not set(processes(pool)) & set(before)


PROGRAM = """
import sys
from paceline.launch.pool import RankPool
from tests.launch.test_pool import job, waits_in_vain
if __name__ == "__main__":
    with RankPool(2, threads=1, fresh=len(sys.argv) > 1) as pool:
        pool.run(job, "", limit=60)
        print("started", flush=True)
        pool.run(waits_in_vain, 0, limit=60)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "fresh"),
    [
        full(signal.SIGINT, []),
        full(signal.SIGTERM, ["fresh"]),
        (signal.SIGKILL, ["fresh"]),
    ],
)
def test_no_rank_outlives_the_process_that_started_it(tmp_path: Path, number: signal.Signals, fresh: list[str]) -> None:
    script = tmp_path / "run.py"
    script.write_text(PROGRAM)
    (tmp_path / "tmp").mkdir()
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    with program([sys.executable, str(script), *fresh], tmp_path, environment) as started:
        assert started.process.stdout is not None
        assert started.process.stdout.readline() == "started\n"
        assert len(started.alive()) > 2 and list((tmp_path / "tmp").glob("paceline-ranks-*"))
        # As a terminal does it: to the whole group for Ctrl-C.
        if number == signal.SIGINT:
            os.killpg(started.process.pid, number)
        else:
            started.process.send_signal(number)
        started.wait_until_gone(20)
        _, err = started.process.communicate()
    # The ranks themselves say nothing.
    assert err.count("Traceback") == (number == signal.SIGINT)
    assert not list((tmp_path / "tmp").glob("paceline-*"))


IMPORTING = """
import signal, sys, time
from paceline.launch.pool import import_ahead
if __name__ == "__main__":
    import_ahead()
    print("started", flush=True)
"""


def test_what_ranks_are_forked_from_ends_with_the_program_though_it_still_imports(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING)
    command = [sys.executable, str(tmp_path / "importing.py")]
    with program(command, ROOT, {"PYTHONPATH": str(ROOT)}) as started:
        started.process.wait(30)
        # Importing torch takes longer.
        started.wait_until_gone(20)
