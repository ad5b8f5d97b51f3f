"""Starts a training that goes on when it loses workers, on this host or as one of several."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from paceline.core.errors import UserError
from paceline.launch.process import Command
from paceline.train.config import TrainConfig, check_ranks
from paceline.train.run_folder import check_run_folder


def start(config: TrainConfig, command: Command, hosts: int) -> int:
    """Starts the workers of this host, or of all, and waits for the end of the job; returns its exit status.

    Args:
        config: One that `replaces`.
        command: Of every worker.
        hosts: On how many this command runs, by torchrun's or Slurm's variables.

    Raises:
        UserError: The settings do not fit, hosts do not meet, or processes cannot be started.
    """
    least = check_members(config, hosts)
    assert config.workers is not None
    numbers = Numbers(config)
    sizes = config.workers, least, config.spares, config.threads, numbers.fit, numbers.planned
    if hosts == 1:
        from paceline.launch.replacing import launch_replacing

        _check_folder(config)
        return launch_replacing(command, *sizes)
    from paceline.launch.following import follow
    from paceline.launch.host_meeting import HostMeeting
    from paceline.launch.leading import lead

    meeting = HostMeeting(os.environ)
    if meeting.host:
        return follow(meeting, command, config.workers, config.spares, config.threads)
    _check_folder(config)
    return lead(meeting, command, *sizes)


class Numbers:
    """How many ranks can share a run's work."""

    def __init__(self, config: TrainConfig) -> None:
        """As its configuration says."""
        self._config = config

    def fit(self, ranks: int) -> bool:
        """Whether so many can."""
        return self._config.fits(ranks)

    def planned(self, strategy: dict[str, Any]) -> None:
        """With `plan: auto` ranks choose the strategy: from now on that counts."""
        chosen = replace(self._config.strategy, zero=strategy["zero"], shard=strategy["shard"])
        self._config = replace(self._config, strategy=chosen)


def check_members(config: TrainConfig, hosts: int) -> int:
    """Checks the settings of a job that goes on when workers are lost.

    Args:
        config: One that `replaces`.
        hosts: On how many this command runs.

    Returns:
        Ranks with which it goes on at least.

    Raises:
        UserError: There are too few workers, or they do not fit.
    """
    ranks = hosts * (config.workers or 0)
    if ranks < 2:
        raise UserError(
            "min_workers and spares: workers that this command starts can be replaced; say how many with workers, "
            "2 or more on one host"
        )
    check_ranks(config, ranks)
    least = ranks if config.min_workers is None else config.min_workers
    of = f", {config.workers} on each of {hosts} hosts" if hosts > 1 else ""
    if not 1 <= least <= ranks:
        raise UserError(f"min_workers: expected 1 to {ranks}, the workers{of}, got {least}")
    return least


def _check_folder(config: TrainConfig) -> None:
    if config.resume is None:
        check_run_folder(config.folder)
