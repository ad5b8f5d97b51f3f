"""Where a run's results go, so that the loop need not ask which rank it is."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.data import Corpus
from paceline.engine.api import full_state_dict
from paceline.launch.screen import columns, show
from paceline.launch.status_line import StatusLine, Text
from paceline.models.safetensors_file import save_weights
from paceline.models.transformer import Transformer
from paceline.train.config import TrainConfig
from paceline.train.environment import environment_facts
from paceline.train.metrics import Tracker, open_trackers
from paceline.train.run_folder import CONFIG, ENVIRONMENT, TOKENIZER, WEIGHTS, RunFolder
from paceline.train.status_text import TrainingProgress
from paceline.train.yaml_file import to_yaml

TELL_SECONDS = 10.0
"""Where there is no status line, long work that is not training says so often how far it has come."""
WIDTH_OF_A_LINE = 80


class Outputs:
    """On rank 0 a folder, trackers and the screen, elsewhere nowhere. While entered, the status line is shown.

    Attributes:
        folder: The run's folder; None on other ranks.
        trackers: What gets the figures.
        progress: What the status line says while training.
        seconds: How long what is no training took, by what it was.
    """

    def __init__(self, world: World, folder: RunFolder | None, progress: TrainingProgress) -> None:
        """Writes and shows nothing yet."""
        self.world, self.folder, self.progress = world, folder, progress
        self.trackers: list[Tracker] = []
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._status_line = StatusLine(progress.text)
        self._told = 0.0
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        if self.folder is not None:
            self._status_line.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.folder is not None:
            self._status_line.__exit__(*error)
            self.folder.close()

    @property
    def columns(self) -> int | None:
        """How wide a line of figures may be; None where it is not for a terminal."""
        return columns(sys.stdout)

    def begin(self, config: TrainConfig, corpus: Corpus, threads: int, is_known: bool = False) -> None:
        """Writes down what the run starts from, unless that is known."""
        if self.folder is not None and not is_known:
            self.folder.write_text(CONFIG, to_yaml(config))
            facts = environment_facts(self.world, threads)
            self.folder.write_text(ENVIRONMENT, json.dumps(facts, indent=2) + "\n")
            self.folder.write_text(TOKENIZER, corpus.definition)
        if self.folder is not None:
            self.trackers = open_trackers(config.log, self.folder, config.to_dict())

    def say(self, *lines: str) -> None:
        """Shows lines."""
        if self.folder is not None:
            show(*lines)
            self._status_line.draw()

    def say_once(self, topic: str, line: str) -> None:
        """Shows a line unless one on the same topic was shown before."""
        if topic not in self._said:
            self._said.add(topic)
            self.say(line)

    @contextmanager
    def showing(self, work: str, text: Text | None = None) -> Iterator[None]:
        """Inside, the status line says what is done instead of training, and the time counts as that.

        Args:
            work: What is done, such as "saving the weights".
            text: How far it has come; by default what is done.
        """
        began = self._told = time.perf_counter()
        try:
            with self._status_line.showing(text or (lambda columns: work)):
                yield
        finally:
            self.seconds[work] += time.perf_counter() - began

    def tell_now_and_then(self, text: Text) -> None:
        """Says how far long work has come where no status line does."""
        now = time.perf_counter()
        if now - self._told > TELL_SECONDS and columns(sys.stderr) is None:
            self._told = now
            self.say(text(WIDTH_OF_A_LINE))

    def log(self, figures: dict[str, float | int], step: int) -> None:
        """Gives figures to every tracker."""
        for tracker in self.trackers:
            tracker.log(figures, step)

    def save(self, model: Transformer) -> None:
        """Saves the weights; a failure is warned about. A collective call where they are sharded."""
        state = full_state_dict(model)
        if self.folder is not None:
            self.folder.write(WEIGHTS, lambda path: save_weights(state, path, model.config))

    def save_at_end(self, model: Transformer) -> UserError | None:
        """Saves the weights, as `save` does, but gives a failure back, to be raised when all else is told."""
        state = full_state_dict(model)
        if self.folder is None:
            return None
        path = self.folder.path / WEIGHTS
        # Whatever happened to earlier weights is old news now.
        self.folder.problems.pop(WEIGHTS, None)
        try:
            save_weights(state, path, model.config)
        except UserError as error:
            left = "; the weights of the last validation are still there" if path.exists() else ""
            return UserError(
                f"the weights could not be saved: {path}: {error.__cause__ or error}{left}. "
                "Free space there, or choose a folder on another disk with --folder, and train again"
            )
        return None
