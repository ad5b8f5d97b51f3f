"""Which run a command goes on with, and whether its settings are those that the run was begun with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in, read_manifest
from paceline.core.errors import UserError
from paceline.train.config import AUTO, TrainConfig
from paceline.train.run_folder import CONFIG, LATEST, RUNS, run_of
from paceline.train.yaml_file import overlay, read_yaml

MAY_CHANGE = (
    "steps",
    "optim.lr",
    "optim.on_divergence",
    "micro_batch",
    "plan",
    "data.cache",
    "tf32",
    "threads",
    "workers",
    "min_workers",
    "spares",
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
        checkpoint: One of its checkpoints, or the folder of all; None where there is none yet, or none is needed.
        is_kept: Whether ranks of the job before have kept all in their memory.
    """

    run: Path
    checkpoint: Path | None
    is_kept: bool = False

    @property
    def from_memory(self) -> bool:
        """Whether it is what ranks of the job before held in memory."""
        return self.is_kept or (self.checkpoint is not None and self.run not in self.checkpoint.parents)


def find_resume(config: TrainConfig) -> Resume | None:
    """What a command goes on from; None where a new run begins.

    Raises:
        UserError: The run has no checkpoint, has ended, or was begun with other settings.
    """
    if config.resume is None:
        return None
    if config.resume == AUTO:
        run = Path(config.folder).expanduser() if config.folder is not None else Path(RUNS, LATEST)
        if not (run / CONFIG).is_file():
            return None
        found = _checkpoints(run / CHECKPOINTS)
        step = _step(found[0]) if found else 0
        if config.folder is None and (not found or step >= config.steps or _changed(_begun(run, config), config)):
            return None
        # One that was killed before its first checkpoint begins again, in its folder.
        chosen = run / CHECKPOINTS if found else None
    else:
        run, path = run_of(config.resume), Path(config.resume).expanduser()
        chosen = run / CHECKPOINTS if path.resolve() == run.resolve() else path
        step = _step(checkpoints_in(chosen)[0])
    begun = _begun(run, config)
    if config.folder not in (None, begun.folder) and Path(config.folder).expanduser().resolve() != run.resolve():
        raise UserError(
            f"folder: a run goes on in its own folder, {run}, and not in {config.folder}: leave --folder out"
        )
    if changed := _changed(begun, config):
        free = ", ".join(name for name in MAY_CHANGE if not name.endswith("."))
        raise UserError(
            f"resume: {run} was begun with other settings, which decide what is trained on what:\n"
            + "\n".join(f"  {name}: {before}, now {now}" for name, before, now in changed)
            + f"\nLeave them as they were, or begin a new run. May change: {free}, strategy, log "
            "and checkpoint"
        )
    if step >= config.steps:
        raise UserError(f"resume: {run} has done its {step} steps: give more --steps to train on")
    return Resume(run.resolve(), None if chosen is None else chosen.resolve())


def as_planned(config: TrainConfig, resume: Resume) -> TrainConfig:
    """With the strategy and the micro-batch of the run that is gone on with, which a planner chose for it."""
    begun = _begun(resume.run, config)
    return replace(config, strategy=begun.strategy, micro_batch=begun.micro_batch)


def _checkpoints(path: Path) -> list[Path]:
    try:
        return checkpoints_in(path)
    except UserError:
        return []


def _step(path: Path) -> int:
    """A checkpoint's step by its name; where it was given another, by what is in it."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else read_manifest(path).step


def _begun(run: Path, config: TrainConfig) -> TrainConfig:
    """The run's own settings."""
    path = str(run / CONFIG)
    node = read_yaml(path)
    return config if node is None else overlay(replace(TrainConfig(), workers=config.workers), node, path)


def _changed(begun: TrainConfig, config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Settings that differ from the run's and may not: (name, the run's, now)."""
    before, now = flat(begun.to_dict()), flat(config.to_dict())
    return [
        (name, value, now.get(name))
        for name, value in before.items()
        if value != now.get(name) and not name.startswith(MAY_CHANGE)
    ]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
