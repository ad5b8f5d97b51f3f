"""Groups of processes: what they say, how they fail, and that none of them stays."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from paceline.bench.comm import group as group_module
from paceline.bench.comm.group import Group, GroupError, python_module, search_path
from paceline.bench.comm.groups import MpiInstallation, find_mpi, start_mpi
from paceline.bench.comm.measure import MOST, System, measure, repeats, systems_for
from paceline.bench.comm.rows import make_rows
from paceline.core.errors import UserError

RANKS = 2
NUMEL = 1000


def start(ranks: int = RANKS, claimed: int = RANKS) -> Group:
    module = python_module("tests.bench.comm.rank_programs")
    commands = [[*module, str(rank), str(ranks), str(claimed)] for rank in range(ranks)]
    return Group(ranks, commands, [search_path()] * ranks)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    group = start()
    yield group
    group.close()


def quiet(_: str) -> None:
    pass


@pytest.mark.full
def test_wrong_results_are_counted_and_what_fails_is_named(group: Group) -> None:
    assert group.missing == {"something": "not here"}
    systems = systems_for("all_reduce", [group], ("right", "wrong", "refused"))
    assert [system.algorithm for system in systems] == ["right", "wrong", "refused"]
    failures: dict[str, str] = {}
    said: list[str] = []
    right, wrong = measure("all_reduce", NUMEL, systems, 3, failures, said.append)
    assert right.wrong == 0
    assert wrong.wrong == 2, "of rank 1 alone"
    assert failures == {"all_reduce over made refused": "TypeError: not this"}
    assert said[:2] == ["checking made right", "checking made wrong"]
    assert said[-1] == "round 3 of 3"
    for timing in (right, wrong):
        assert len(timing.seconds) == 3
        assert all(0 < seconds < 60 for seconds in timing.seconds)
    rows = make_rows("all_reduce", RANKS, "float32", 4, NUMEL, [right, wrong])
    assert [(row.transport, row.algorithm, row.wrong) for row in rows] == [("made", "right", 0), ("made", "wrong", 2)]


@pytest.mark.full
def test_of_ways_to_call_one_library_there_is_one_row_which_says_the_way(group: Group) -> None:
    systems = [System(group, "made", way) for way in ("*one way", "*other way")]
    timings = measure("all_reduce", NUMEL, systems, 2, {}, quiet)
    timings[0].seconds, timings[1].seconds = [3.0, 3.0], [2.0, 2.0]
    (row,) = make_rows("all_reduce", RANKS, "float32", 4, NUMEL, timings)
    assert (row.algorithm, row.buffers, row.time_us) == ("own", "other way", 2e6)
    timings[1].wrong = 1
    (row,) = make_rows("all_reduce", RANKS, "float32", 4, NUMEL, timings)
    assert (row.buffers, row.wrong) == ("one way", 0), "wrong results are no better for being fast"


def test_a_barrier_that_a_rank_leaves_before_all_have_come_is_wrong(group: Group) -> None:
    systems = systems_for("barrier", [group], ())
    assert [system.algorithm for system in systems] == ["right", "idle", "hasty"]
    failures: dict[str, str] = {}
    wrong = []
    # Once is not enough where a rank is held up for as long as another is late.
    for _ in range(3):
        timings = measure("barrier", 0, systems, 2, failures, quiet)
        wrong.append([timing.wrong for timing in timings])
        (row, *_) = make_rows("barrier", RANKS, "float32", 4, 0, timings)
        assert row.time_us > 0
        assert (row.bytes, row.count, row.redop, row.algbw, row.busbw) == (0, 0, "none", 0, 0)
    assert failures == {}
    right, idle, hasty = zip(*wrong, strict=True)
    assert max(right) == 0
    assert max(idle) == 2, "each rank, when the other is late"
    # Where the machine holds rank 1 up, rank 0 is early once more: of three times that is the median seldom.
    assert median(hasty) == 1, "rank 0, when rank 1 is late"


@pytest.mark.full
def test_waiting_ranks_take_no_time_and_end_with_the_group() -> None:
    group = start()
    pids = [process.pid for process in group._processes]

    def used() -> float:
        ticks = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13] for pid in pids]
        return sum(int(each) for pair in ticks for each in pair) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(1)
    assert used() - before < 0.1, "seconds of computing, of 2 processes in 1 s"
    group.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not group._folder.path.exists()


def test_a_group_whose_rank_dies_is_left_out_from_then_on_with_its_last_words(group: Group) -> None:
    systems = [System(group, "made", algorithm) for algorithm in ("right", "deadly", "wrong")]
    failures: dict[str, str] = {}
    assert measure("all_reduce", NUMEL, systems, 2, failures, quiet) == []
    assert list(failures) == ["all_reduce over made deadly"]
    assert failures["all_reduce over made deadly"].startswith("OSError: gone for good; everything else")
    assert group.closed, "so this test is the last that uses it"


def test_processes_that_end_at_once_are_named_with_their_last_words() -> None:
    script = "import sys; sys.exit('it rains')"
    with pytest.raises(GroupError, match="it rains"):
        Group(1, [[sys.executable, "-c", script]], [{}])
    with pytest.raises(GroupError, match="its processes ended with status 3"):
        Group(1, [[sys.executable, "-c", "raise SystemExit(3)"]], [{}])


def test_ranks_that_do_not_come_are_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "START_SECONDS", 0.3)
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.1)
    with pytest.raises(GroupError, match=r"0 of 1 ranks came within 0\.3 s"):
        Group(1, [["sleep", "60"]], [{}])


@pytest.mark.full
def test_a_launcher_of_another_library_is_recognised() -> None:
    with pytest.raises(GroupError, match="a world of 2 instead of 1: mpiexec is not of this library"):
        start(ranks=1)


def test_a_turn_is_long_enough_to_measure_and_not_longer() -> None:
    assert repeats(1e-3) == 20
    assert repeats(1e-6) == MOST
    assert repeats(10.0) == 5


def installation(folder: Path, mpiexec: str, library: str = "lib/libmpi.so.12") -> Path:
    """A folder as the wheels make it, whose mpiexec is a script and whose library is none."""
    for name in ("bin/mpiexec", library):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{mpiexec}\n")
    (folder / "bin" / "mpiexec").chmod(0o755)
    return folder


def test_mpi_is_found_in_folders_and_each_library_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    assert find_mpi([]) == []
    first = installation(tmp_path / "first", "exit 0")
    second = installation(tmp_path / "second", "exit 0", "lib/libmpi.so.40")
    (tmp_path / "alias").symlink_to(first)
    found = find_mpi([str(first), str(second), str(tmp_path / "alias")])
    assert [each.library for each in found] == [first / "lib/libmpi.so.12", second / "lib/libmpi.so.40"]
    assert found[0].environment()["MPI4PY_LIBMPI"] == str(first / "lib/libmpi.so.12")
    monkeypatch.setenv("PATH", str(second / "bin"))
    assert [each.folder for each in find_mpi([])] == [second]


def test_a_folder_without_mpi_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--mpi: expected a folder with bin/mpiexec and .*pip install --prefix"):
        find_mpi([str(tmp_path)])


def test_an_mpi_that_cannot_run_is_skipped_with_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    # Drops "-n 2" and starts one rank, which then finds that the library is none.
    folder = installation(tmp_path / "broken", 'shift 2\nexec "$@"')
    groups: list[Group] = []
    missing = start_mpi(RANKS, "float32", 8, [MpiInstallation(folder, folder / "lib/libmpi.so.12")], groups)
    assert groups == []
    assert missing[f"MPI in {folder}"].startswith("RuntimeError: cannot load MPI library")
    assert "pip install 'paceline[mpi]'" in missing["MPICH"]
    assert "impi-rt" in missing["Intel MPI"]


def test_without_mpi4py_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = start_mpi(RANKS, "float32", 8, [], [])
    assert missing == {"MPI": "mpi4py is not installed: pip install 'paceline[mpi]'"}
