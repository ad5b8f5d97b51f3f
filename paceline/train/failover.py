"""What training goes on from when a rank is lost: what the other ranks hold in memory, or the latest checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.checkpoint.folder import CHECKPOINTS, checkpoints_in
from paceline.core.errors import UserError
from paceline.launch.seat import Place
from paceline.train.config import TrainConfig
from paceline.train.former import Former
from paceline.train.held_checkpoint import checkpoint_of_held
from paceline.train.resume import Resume, find_resume


class LeaveJob(Exception):
    """The ranks leave the job between two steps, to form one with more ranks."""


@dataclass(frozen=True)
class Found:
    """What a job goes on from.

    Attributes:
        resume: As `find_resume`, of the run that the job before trained.
        is_kept: Whether rank 0 holds all of it, from which the others have it that lack it.
        has_all: Whether this rank does.
        someone_lacks: Whether any does not.
    """

    resume: Resume | None
    is_kept: bool = False
    has_all: bool = False
    someone_lacks: bool = False


def go_on(config: TrainConfig, former: Former, place: Place) -> Found:
    """What a job goes on from, which may have lost ranks of the one before, or be the first. A collective call.

    Where rank 0 holds all of it, that is all. Else ranks that were in the job before write what they hold into the
    folder in memory, where the strategy replicates it; if not, a lost rank's shards are lost with it, and the latest
    checkpoint has to do.
    """
    told: list[dict[str, Any]] = pl.all_gather_json(_account(former), "what ranks have left of the job before")
    runs = [each["run"] for each in told if each["run"] is not None]
    if place.work:
        # Known to the launcher where all ranks were lost.
        runs.append(place.work)
    if not runs:
        former.training = former.kept = None
        return Found(find_resume(config))
    run = former.run = Path(runs[0])
    # One that has waited since an earlier job is behind.
    latest = max((each["place"]["epoch"] for each in told if each["place"] is not None), default=-1)
    states = [(each["is_whole"], each["place"] and each["place"]["epoch"], each["done"]) for each in told]
    have = [state == (True, latest, states[0][2]) for state in states]
    if have[0]:
        if not have[place.rank]:
            # What is half received must not be handed on.
            former.training = former.kept = None
        return Found(Resume(run, None, is_kept=True), True, have[place.rank], not all(have))
    path, error = checkpoint_of_held(former, place, told)
    former.free()
    if path is not None and not error:
        return Found(Resume(run, path))
    checkpoints = pl.all_gather_json(_has_checkpoint(run), "whether the run has a checkpoint")[0]
    return Found(Resume(run, run / CHECKPOINTS if checkpoints else None))


def _account(former: Former) -> dict[str, Any]:
    """What this rank has left, in words that all understand."""
    return {
        "run": None if former.run is None else str(former.run),
        "place": None if former.place is None else asdict(former.place),
        "done": former.done,
        "is_whole": former.kept is not None,
    }


def _has_checkpoint(run: Path) -> bool:
    try:
        return bool(checkpoints_in(run / CHECKPOINTS))
    except UserError:
        return False
