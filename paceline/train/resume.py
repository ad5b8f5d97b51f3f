"""Which run a command goes on with, and whether its settings are those that the run was begun with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import checkpoints_in, is_complete
from paceline.core.errors import UserError
from paceline.train.config import AUTO, TrainConfig
from paceline.train.run_folder import CHECKPOINTS, CONFIG, LATEST, RUNS, run_of
from paceline.train.yaml_file import overlay, read_yaml

MAY_CHANGE = (
    "steps",
    "optim.lr",
    "micro_batch",
    "threads",
    "workers",
    "timeout",
    "folder",
    "resume",
    "strategy.",
    "log.",
    "checkpoint.",
)
"""Settings that a run may go on with others of; the rest decide what the model is, or which samples it sees when."""


@dataclass(frozen=True)
class Resume:
    """What a run goes on from.

    Attributes:
        run: The run's folder.
        checkpoint: One of its checkpoints, or the folder of all.
        step: That of the latest.
    """

    run: Path
    checkpoint: Path
    step: int


def find_resume(config: TrainConfig) -> Resume | None:
    """What a command goes on from; None where a new run begins.

    Raises:
        UserError: The run has no checkpoint, has ended, or was begun with other settings.
    """
    if config.resume is None:
        return None
    if config.resume == AUTO:
        run = Path(config.folder).expanduser() if config.folder is not None else Path(RUNS, LATEST)
        if not (run / CONFIG).is_file() or not (found := _checkpoints(run / CHECKPOINTS)):
            return None
        step = int(found[0].name.removeprefix("step-"))
        if config.folder is None and (step >= config.steps or _changed(run, config)):
            return None
        chosen = run / CHECKPOINTS
    else:
        run, path = run_of(config.resume), Path(config.resume).expanduser()
        chosen = path if is_complete(path) else run / CHECKPOINTS
        found = checkpoints_in(chosen)
        step = int(found[0].name.removeprefix("step-"))
    if changed := _changed(run, config):
        raise UserError(
            f"resume: {run} was begun with other settings, which decide what is trained on what:\n"
            + "\n".join(f"  {name}: {before}, now {now}" for name, before, now in changed)
            + f"\nLeave them as they were, or begin a new run. May change: {', '.join(MAY_CHANGE[:6])}, strategy, log "
            "and checkpoint"
        )
    if step >= config.steps:
        raise UserError(f"resume: {run} has done its {step} steps: give more --steps to train on")
    return Resume(run.resolve(), chosen.resolve(), step)


def _checkpoints(path: Path) -> list[Path]:
    try:
        return checkpoints_in(path)
    except UserError:
        return []


def _changed(run: Path, config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Settings that differ from the run's and may not: (name, the run's, now)."""
    path = str(run / CONFIG)
    node = read_yaml(path)
    begun = config if node is None else overlay(replace(TrainConfig(), workers=config.workers), node, path)
    before, now = _flat(begun.to_dict()), _flat(config.to_dict())
    return [
        (name, value, now.get(name))
        for name, value in before.items()
        if value != now.get(name) and not name.startswith(MAY_CHANGE)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
