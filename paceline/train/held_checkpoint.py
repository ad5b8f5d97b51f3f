"""A checkpoint in memory of what the ranks of the job before hold, on every host: what the next job can load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import paceline as pl
from paceline.checkpoint.folder import step_folder
from paceline.checkpoint.hand_on import hand_on
from paceline.checkpoint.survivors import choose_writers, commit_held, write_held
from paceline.core.errors import UserError
from paceline.launch.seat import Place
from paceline.train.former import Former


def checkpoint_of_held(former: Former, place: Place, told: list[dict[str, Any]]) -> tuple[Path | None, str]:
    """The checkpoint that is made of what ranks hold, on every host; and what went wrong. A collective call."""
    chosen = _choose(former, place, told)
    written = _agreed(partial(_write, former, place, chosen), "what ranks hold in memory")
    paths = [Path(each["path"]) for each in written.values if each]
    if not paths or written.error:
        return None, written.error
    world, several = pl.init(), place.local_world_size < place.world_size
    if several:
        files = [(rank, name, size) for rank, each in enumerate(written.values) if each for name, size in each["files"]]
        problem = _agreed(lambda: _copied(paths[0], files, world), "copies of what ranks hold").error
        if problem:
            return None, problem
    commits = world.rank == next(rank for rank, each in enumerate(written.values) if each)
    made = _agreed(partial(_commit, former, paths[0], chosen) if commits else _nothing, "a checkpoint in memory")
    if several and not made.error:
        index = next((rank, *each) for rank, each in enumerate(made.values) if each)
        return paths[0], _agreed(lambda: _copied(paths[0], [index], world), "copies of its manifest").error
    return paths[0], made.error


def _choose(former: Former, place: Place, told: list[dict[str, Any]]) -> tuple[int, list[int]] | None:
    """The step and the ranks of the job before that write what they hold; None if this one does not."""
    if former.training is None or former.place is None:
        return None
    # One that has waited since an earlier job is behind.
    latest = max(each["place"]["epoch"] for each in told if each["place"] is not None)
    done = {
        each["place"]["rank"]: each["done"]
        for each in told
        if each["done"] is not None and each["place"]["epoch"] == latest
    }
    schedule = pl.engine_of(former.training.model).schedule
    chosen = choose_writers(schedule, done) if former.place.epoch == latest and done else None
    return chosen if chosen is not None and former.place.rank in chosen[1] else None


def _write(former: Former, place: Place, chosen: tuple[int, list[int]] | None) -> dict[str, Any] | None:
    """Writes what this rank holds, if it is `chosen`: where, and the files."""
    if chosen is None or former.training is None:
        return None
    step, writers = chosen
    training = former.training
    folder = step_folder(Path(place.memory), step)
    folder.mkdir(parents=True, exist_ok=True)
    engine, extra = pl.engine_of(training.model), training.checkpoints.extra()
    files = write_held(folder, engine, training.update.optimizer, extra, writers)
    return {"path": str(folder), "files": files}


def _commit(former: Former, folder: Path, chosen: tuple[int, list[int]] | None) -> tuple[str, int] | None:
    """Makes a checkpoint of what was written: the name and bytes of the file that does so."""
    assert former.training is not None and chosen is not None
    made = commit_held(folder, pl.engine_of(former.training.model), *chosen)
    return made.name, made.stat().st_size


def _copied(folder: Path, files: Sequence[tuple[int, str, int]], world: pl.World) -> None:
    if problem := hand_on(folder, files, world):
        raise OSError(problem)


def _nothing() -> None:
    """What ranks do that have nothing to do."""


class _Agreed(NamedTuple):
    values: list[Any]
    error: str


def _agreed(work: Callable[[], Any], label: str) -> _Agreed:
    """What every rank's work returns, and what went wrong on any, which is then no reason to stop."""
    value, mine = None, ""
    try:
        value = work()
    except (OSError, UserError) as error:
        mine = str(error) or type(error).__name__
    told = pl.all_gather_json([value, mine], label)
    return _Agreed([each for each, _ in told], next((words for _, words in told if words), ""))
