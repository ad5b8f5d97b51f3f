"""A run's folder, read as far as it can be; what is missing or damaged is said, and nothing is made up for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import UserError
from paceline.report.chunk_norms import ChunkNorms, chunk_norms, read_gradients
from paceline.report.facts import Facts, read_facts
from paceline.report.forecast import Forecast, read_forecast
from paceline.report.gradient_norms import Norms
from paceline.report.history import History, Row
from paceline.report.lines import Damage, read_lines
from paceline.report.link import Link, fitted_link
from paceline.report.meetings import groups_of
from paceline.report.prediction import Prediction
from paceline.report.program import Program, program_of
from paceline.report.recordings import Place, Recording, find_recordings, read_recordings
from paceline.report.single_changes import Single, single_changes
from paceline.report.steps import Step
from paceline.report.variants import choices
from paceline.report.what_if import WhatIf

if TYPE_CHECKING:
    from paceline.core.strategy import Strategy
    from paceline.train.config import TrainConfig

MOST_EVENTS = 100_000
"""So many are read for a page, which has 50 bytes of each."""


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Attributes:
        path: Its folder.
        config: Its settings; None if they cannot be read.
        facts: Where it took place, as far as that is written down.
        history: Its figures.
        places: Where the recorded steps lie.
        steps: Those of them that were read, in order.
        program: What recorded steps executed, most of them; None if that is not known.
        checkpoints: Steps of the checkpoints that are there.
        problems: Sentences that say what is missing, damaged or left out.
        norms: Of gradients in the latest step that has some.
        forecast: What was predicted of it; None where it has not ended, or nothing was.
        chunk_norms: Of what ranks' gradients add up to, chunk by chunk, in the same step; None if that is not known.
        is_own_loop: Whether it is a recording of a loop of the user's own, of which ops alone are known.
        called: Its name where the folder's own does not tell it from another run's.
    """

    path: Path
    config: TrainConfig | None
    facts: Facts
    history: History
    places: tuple[Place, ...]
    steps: tuple[Step, ...]
    program: Program | None
    checkpoints: tuple[int, ...]
    problems: tuple[str, ...]
    norms: tuple[Norms, ...] = ()
    forecast: Forecast | None = None
    chunk_norms: ChunkNorms | None = None
    is_own_loop: bool = False
    called: str = ""

    @property
    def name(self) -> str:
        """What it is called: the folder's own name, unless it is to be told from another's."""
        return self.called or self.path.resolve().name

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return max([self.facts.ranks, *(step.recording.world_size for step in self.steps)])

    @cached_property
    def prediction(self) -> Prediction | None:
        """A step as its schedule has it; None if that is not known of the typical one."""
        if self.program is None or self.typical is None or not self.program.suits(self.typical.recording):
            return None
        alike = [step for step in self.steps if step.recording.ranks == self.typical.recording.ranks]
        return Prediction(self.program, *(step for step in alike if self.program.suits(step.recording)))

    @cached_property
    def link(self) -> Link | None:
        """What recorded collectives say of the ranks' links; None if that is nothing."""
        return fitted_link(self.steps)

    @cached_property
    def what_if(self) -> WhatIf | None:
        """What it would take otherwise; None without a prediction of some length, or a link."""
        if self.program is None or self.prediction is None or self.link is None:
            return None
        found = WhatIf(self.program, self.prediction, self.link)
        return found if found.predict(found.own).seconds > 0 else None

    @cached_property
    def single_changes(self) -> list[Single]:
        """What one change at a time would do, as far as that can be simulated."""
        if self.what_if is None or self.program is None:
            return []
        return single_changes(self.what_if, choices(self.program))

    @cached_property
    def typical(self) -> Step | None:
        """The step in the middle, by how long they took, of those that were read.

        Of a run that went on with another number of ranks, among those of most of the steps.
        """
        world = 0 if self.program is None else self.program.schedule.world_size
        own = [step for step in self.steps if step.recording.world_size == world]
        by_length = sorted(own or self.steps, key=lambda step: step.seconds)
        return by_length[(len(by_length) - 1) // 2] if by_length else None

    @property
    def peak_bytes(self) -> float | None:
        """What a rank held at its fullest, by whatever tells of it: figures, recorded ops, and the run as it ended."""
        told = [self.history.most("memory/peak_bytes"), *(event.memory for step in self.steps for event in step.events)]
        told += [self.forecast.peak_bytes.measured] if self.forecast is not None else []
        return max(filter(None, told), default=None)

    @property
    def slowest(self) -> Step | None:
        """The step that took longest of those that were read."""
        return max(self.steps, key=lambda step: step.seconds, default=None)


def read_run(path: Path, most: int = MOST_EVENTS) -> Run:
    """Reads a run's folder.

    Args:
        path: The folder.
        most: How many events to read, about.
    """
    from paceline.checkpoint.folder import CHECKPOINTS, complete_steps
    from paceline.train.run_folder import ENVIRONMENT, EVENTS, METRICS, PLAN

    problems: list[str] = []
    config = _config(path, problems)
    facts = read_facts(path / ENVIRONMENT, problems)
    damage = Damage()
    lines = read_lines(path / METRICS, msgspec.json.Decoder(dict[str, Any]), damage)
    rows = [Row.of(line.value) for line in lines]
    damage.lines += rows.count(None)
    problems += damage.describe(METRICS)
    history = History(tuple(row for row in rows if row is not None))
    if not history.rows:
        problems.append(f"{METRICS} holds no figures: the run has not written any yet, or it is another program's.")
    damage = Damage()
    found = find_recordings(path / EVENTS, damage)
    problems += damage.describe(EVENTS)
    if not found.places:
        problems.append(
            f"{EVENTS} holds no events, so there is no timeline: log.events-every says in which steps they are "
            "recorded; 0 is in none."
        )
    norms, products = read_gradients(path, problems)
    recordings = read_recordings(path / EVENTS, found, most, problems)
    worlds = [_world(recording, history, facts) for recording in recordings]
    program = _program(path, config, worlds, recordings)
    strategy = None if config is None else config.strategy
    steps = [_step(each, strategy, world, problems) for each, world in zip(recordings, worlds, strict=True)]
    return Run(
        path=path,
        config=config,
        facts=facts,
        history=history,
        places=tuple(found.places),
        steps=tuple(steps),
        program=program,
        checkpoints=tuple(complete_steps(path / CHECKPOINTS)),
        problems=tuple(problems),
        norms=norms,
        forecast=read_forecast(path / PLAN, problems),
        chunk_norms=None if program is None else chunk_norms(products, program.schedule),
    )


def read_own_loop(path: Path, program: Program, facts: Facts, metrics: Sequence[Row], most: int = MOST_EVENTS) -> Run:
    """Reads what was recorded of a loop that is no run of `paceline train`.

    Args:
        path: A folder with an events.jsonl.
        program: What the loop's steps executed.
        facts: Where it took place.
        metrics: Its figures.
        most: How many events to read, about.
    """
    from paceline.train.run_folder import EVENTS

    problems: list[str] = []
    damage = Damage()
    found = find_recordings(path / EVENTS, damage)
    problems += damage.describe(EVENTS)
    recordings = read_recordings(path / EVENTS, found, most, problems)
    known = program if any(map(program.suits, recordings)) else None
    world = max([facts.ranks, *(recording.world_size for recording in recordings)])
    steps = [_step(recording, program.schedule.strategy, world, problems) for recording in recordings]
    norms, products = read_gradients(path, problems)
    return Run(
        path=path,
        config=None,
        facts=facts,
        history=History(tuple(metrics)),
        places=tuple(found.places),
        steps=tuple(steps),
        program=known,
        checkpoints=(),
        problems=tuple(problems),
        norms=norms,
        chunk_norms=chunk_norms(products, program.schedule),
        is_own_loop=True,
    )


def _world(recording: Recording, history: History, facts: Facts) -> int:
    """How many ranks there were: environment.json tells of the latest start, which may have other ones than before."""
    is_of_latest = not history.lives or recording.place.step >= history.lives[-1].first
    return max(facts.ranks, recording.world_size) if is_of_latest else recording.world_size


def _program(
    path: Path, config: TrainConfig | None, worlds: Sequence[int], recordings: Sequence[Recording]
) -> Program | None:
    """The program of most of the recorded steps, if one is by it."""
    if config is None or not recordings:
        return None
    ((world, _),) = Counter(worlds).most_common(1)
    program = program_of(path, config, world)
    return program if program is not None and any(map(program.suits, recordings)) else None


def _step(recording: Recording, strategy: Strategy | None, world: int, problems: list[str]) -> Step:
    step = Step(recording, groups_of(strategy, world))
    problems += _what_is_missing(step, world, len(recording.events) < recording.place.count)
    return step


def _what_is_missing(step: Step, world: int, is_sampled: bool) -> list[str]:
    recording, found = step.recording, []
    if is_sampled:
        found.append(
            f"Step {step.number:,} has {recording.place.count:,} events; {len(recording.events):,} of them are shown, "
            f"of {len(recording.ranks):,} of its {len(recording.place.events):,} ranks."
        )
    elif missing := sorted(set(range(world)) - set(recording.ranks)):
        named = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
        found.append(
            f"Step {step.number:,} has no events of rank{'s' * (len(missing) > 1)} {named}: who came last at a "
            "collective, and what that took, cannot be said of it."
        )
    jumped = [rank for rank, offset in step.clocks.items() if not offset.is_steady]
    if jumped:
        found.append(
            f"In step {step.number:,} no offset makes the clock of rank {', '.join(map(str, jumped[:8]))} agree with "
            "that of rank 0: it jumped, or lines are missing. Times between these ranks mean little there."
        )
    return found


def _config(path: Path, problems: list[str]) -> TrainConfig | None:
    from paceline.train.command_line import parse_train_arguments
    from paceline.train.run_folder import CONFIG

    try:
        return parse_train_arguments([str(path / CONFIG)])
    except (UserError, OSError) as error:
        problems.append(f"The run's settings cannot be read: {error}.")
        return None
