"""Trainings that lose workers and go on, with real processes: the losses are those of one that lost none."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.launch.seat import SEAT
from paceline.train.command_line import parse_train_arguments
from paceline.train.config import TrainConfig
from paceline.train.replacing_job import Numbers, check_members
from tests.quick import full
from tests.ranks import RankPool
from tests.train.processes import PATIENCE, Program, metrics, paceline, program, trained, wait_for_step
from tests.train.test_resume import curve

FLAGS = ("--log.every", "1", "--log.validate-every", "0", "--log.validate-batches", "1", "--steps", "60")
"""Of a training that is long enough to be disturbed once."""


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    status, _, err = trained(ranks, 2, folder, [*nano, *FLAGS, "--folder", "run"])
    assert (status, err) == (0, "")
    return folder / "run"


def seated(started: Program) -> list[int]:
    """Process numbers of the workers, in the order in which they were started."""
    return sorted(pid for pid, environment in started.alive().items() if SEAT in environment)


def jobs(run: Path) -> list[tuple[int, int]]:
    """(ranks, first step) of each job after the first."""
    return [(int(line["run/ranks"]), int(line["run/resumed_from"])) for line in metrics(run) if "run/ranks" in line]


def wait_for_job(started: Program, run: Path, number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(jobs(run)) < number:
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("zero", "lost", "memory"),
    # A rank that is stopped, below, is the other one that is replaced from memory.
    [("0", 0, True), full("2", 1, False), full("3", 0, False)],
)
def test_a_spare_takes_a_killed_ranks_place_and_losses_are_the_same_to_the_bit(
    nano: list[str], tmp_path: Path, undisturbed: Path, zero: str, lost: int, memory: bool
) -> None:
    flags = ["--workers", "2", "--spares", "1", "--strategy.zero", zero, "--checkpoint.every", "10"]
    with program(paceline("train", *nano, *FLAGS, *flags, "--folder", "run"), tmp_path) as started:
        wait_for_step(started, tmp_path / "run", 15)
        while not list((tmp_path / "run").glob("checkpoints/*/manifest.json")):
            # It is written beside training, which a busy machine lets go on faster.
            assert started.process.poll() is None, started.process.communicate()
            time.sleep(0.02)
        os.kill(seated(started)[lost], signal.SIGKILL)
        status, out, err = started.finish()
        assert not started.alive()
    assert status == 0, err
    assert f"rank {lost} of 2 is lost. Signal 9 (SIGKILL) ended it" in err
    # On a busy machine they may not meet in time, and do at another attempt.
    attempts = jobs(tmp_path / "run")
    (ranks, step), *_ = attempts
    assert ranks == 2 and (step >= 15 if memory else step % 10 == 0)
    assert f"2 ranks go on after step {step}, from {'memory' if memory else 'the latest checkpoint'}, " in out
    found, expected = curve(tmp_path / "run"), curve(undisturbed)
    assert set(found) >= set(expected) - {step for _, step in attempts}
    if zero == "0":
        assert all(found[at] == expected[at] for at in found)
    else:
        # The norm of shards is added up in another order.
        for at, figures in found.items():
            assert figures == pytest.approx(expected[at], rel=2e-3), at


@pytest.mark.full
def test_fewer_go_on_and_all_when_a_new_one_has_come(nano: list[str], tmp_path: Path) -> None:
    flags = ["--workers", "2", "--min-workers", "1", "--steps", "100000", "--checkpoint.every", "0"]
    with program(paceline("train", *nano, *FLAGS, *flags, "--folder", "run"), tmp_path) as started:
        wait_for_step(started, tmp_path / "run", 5)
        os.kill(seated(started)[0], signal.SIGKILL)
        wait_for_job(started, tmp_path / "run", 2)
        wait_for_step(started, tmp_path / "run", jobs(tmp_path / "run")[1][1] + 5)
        started.process.send_signal(signal.SIGINT)
        status, out, err = started.finish()
        assert not started.alive()
    assert status == 130, err
    (first, second) = jobs(tmp_path / "run")
    assert first[0] == 1 and second[0] == 2 and first[1] >= 5
    assert f"1 rank goes on after step {first[1]}, from memory" in out
    assert f"2 ranks go on after step {second[1]:,}, from memory" in out
    steps = [int(line["step"]) for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert sorted(set(steps) | {first[1]}) == list(range(1, max(steps) + 1))


@pytest.mark.full
def test_all_may_be_lost_at_once(nano: list[str], tmp_path: Path, undisturbed: Path) -> None:
    flags = ["--workers", "2", "--spares", "1", "--min-workers", "1", "--checkpoint.every", "10"]
    with program(paceline("train", *nano, *FLAGS, *flags, "--folder", "run"), tmp_path) as started:
        wait_for_step(started, tmp_path / "run", 15)
        for pid in seated(started):
            os.kill(pid, signal.SIGKILL)
        status, _, err = started.finish()
    assert status == 0, err
    assert {step % 10 for _, step in jobs(tmp_path / "run")[:1]} == {0}
    found, expected = curve(tmp_path / "run"), curve(undisturbed)
    assert set(found) >= set(range(1, 60))
    for at, figures in found.items():
        assert figures == pytest.approx(expected[at], rel=2e-3), at


@pytest.mark.full
def test_a_rank_that_is_stopped_is_replaced(nano: list[str], tmp_path: Path, undisturbed: Path) -> None:
    # Less would be silence on a busy machine, again and again.
    flags = ["--workers", "2", "--spares", "1", "--timeout", "10"]
    with program(paceline("train", *nano, *FLAGS, *flags, "--folder", "run"), tmp_path) as started:
        wait_for_step(started, tmp_path / "run", 15)
        os.kill(seated(started)[1], signal.SIGSTOP)
        status, out, err = started.finish()
        assert not started.alive()
    assert status == 0, err
    assert "from memory" in out and "rank 1 of 2 is lost" in err
    found, expected = curve(tmp_path / "run"), curve(undisturbed)
    assert all(found[at] == expected[at] for at in found)


@pytest.mark.full
def test_what_is_replicated_survives_in_memory(nano: list[str], tmp_path: Path) -> None:
    flags = ["--strategy.zero", "3", "--strategy.shard", "2", "--workers", "4", "--min-workers", "2"]
    with program(paceline("train", *nano, *FLAGS, *flags, "--folder", "run"), tmp_path) as started:
        wait_for_step(started, tmp_path / "run", 15)
        os.kill(seated(started)[1], signal.SIGKILL)
        status, out, err = started.finish()
    assert status == 0, err
    # Three cannot be two groups.
    (ranks, step) = jobs(tmp_path / "run")[0]
    assert ranks == 2 and f"2 ranks go on after step {step}, from memory" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--spares", "1"], "say how many with workers, 2 or more"),
        (["--workers", "2", "--min-workers", "3"], "min_workers: expected 1 to 2, the workers, got 3"),
        (["--workers", "2", "--spares", "-1"], "spares: expected 0 or more processes, got -1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_members(parse_train_arguments(flags), hosts=1)
    assert words in str(caught.value)


def test_the_workers_of_all_hosts_are_counted() -> None:
    config = parse_train_arguments(["--workers", "1", "--min-workers", "2", "--strategy.zero", "1"])
    assert check_members(config, hosts=2) == 2
    with pytest.raises(UserError, match="expected 1 to 4, the workers, 2 on each of 2 hosts, got 5"):
        check_members(replace(config, workers=2, min_workers=5), hosts=2)


def test_sizes_that_share_the_work_fit() -> None:
    config = TrainConfig(batch=3)
    assert [config.fits(ranks) for ranks in (1, 3, 4)] == [True, True, False]


def test_what_the_planner_chose_decides_which_sizes_share_the_work() -> None:
    numbers = Numbers(TrainConfig(batch=8, plan="auto"))
    assert [numbers.fit(ranks) for ranks in (3, 4, 9)] == [True, True, False]
    numbers.planned({"zero": 2, "shard": 2})
    assert [numbers.fit(ranks) for ranks in (3, 4, 9)] == [False, True, False]
