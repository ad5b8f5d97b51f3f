from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.launch import cores
from paceline.launch.cores import available_cores, threads_per_rank, waited_for_a_core


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /sys/fs/cgroup, on a machine with 16 cores."""
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_quota_all_cores_that_a_process_is_bound_to_count(groups: Path) -> None:
    write(groups, cpu__max="max 100000\n")
    assert cores._granted("", "/") == float("inf")
    assert cores._granted("memory", "/") == float("inf")


def test_the_least_quota_of_a_group_and_those_above_counts(groups: Path) -> None:
    write(groups / "a", cpu__max="250000 100000\n")
    write(groups / "a" / "b", cpu__max="800000 100000\n")
    assert cores._granted("", "/a/b") == 2.5
    assert cores._granted("", "/a/b/not-mounted-here") == 2.5
    write(groups / "cpu,cpuacct" / "job", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    write(groups / "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cores._granted("cpu,cpuacct", "/job") == 3
    assert cores._granted("cpu,cpuacct", "/") == float("inf")


@pytest.mark.parametrize(("quota", "count"), [(float("inf"), 16), (2.5, 3), (0.2, 1), (64, 16)])
def test_part_of_a_core_is_one(groups: Path, monkeypatch: pytest.MonkeyPatch, quota: float, count: int) -> None:
    monkeypatch.setattr(cores, "_quota", lambda: quota)
    assert available_cores() == count


@pytest.mark.parametrize(
    ("given", "threads"), [(None, 4), ("3", 3), (" 2,1", 2), ("", 4), ("none", 4), ("0", 4), ("-1", 4)]
)
def test_openmps_own_variable_counts_unless_threads_are_given(
    groups: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.setattr(cores, "_quota", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_per_rank(0, 4) == threads
    assert threads_per_rank(5, 4) == 5
    assert threads_per_rank(0, 99) == (1 if threads == 4 else threads)


def test_the_time_that_a_process_waits_for_a_core_only_grows() -> None:
    before = waited_for_a_core()
    assert 0 <= before <= waited_for_a_core()


def test_more_threads_than_openmp_survives_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    with pytest.raises(UserError, match="OMP_NUM_THREADS: expected at most 4096, got 100000"):
        threads_per_rank(0, 1)
