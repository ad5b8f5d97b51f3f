"""Where a run's results go, so that the loop need not ask which rank it is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from paceline.comm.world import World
from paceline.data import Corpus
from paceline.models.transformer import Transformer
from paceline.models.weights import save_weights
from paceline.train.config import TrainConfig
from paceline.train.environment import environment_facts
from paceline.train.metrics import Tracker, open_trackers
from paceline.train.run_folder import CONFIG, ENVIRONMENT, TOKENIZER, WEIGHTS, RunFolder
from paceline.train.screen import show
from paceline.train.yaml_file import to_yaml


@dataclass
class Outputs:
    """On rank 0 a folder, trackers and the screen, elsewhere nowhere."""

    world: World
    folder: RunFolder | None = None
    trackers: list[Tracker] = field(default_factory=list)

    def begin(self, config: TrainConfig, corpus: Corpus, threads: int) -> None:
        """Writes down what the run starts from."""
        if self.folder is not None:
            self.folder.write_text(CONFIG, to_yaml(config))
            facts = environment_facts(self.world, threads)
            self.folder.write_text(ENVIRONMENT, json.dumps(facts, indent=2) + "\n")
            self.folder.write_text(TOKENIZER, corpus.tokenizer.read_text(encoding="utf-8"))
            self.trackers = open_trackers(config.log, self.folder, config.to_dict())

    def say(self, line: str) -> None:
        """Shows a line."""
        if self.folder is not None:
            show(line)

    def log(self, figures: dict[str, float | int], step: int) -> None:
        """Gives figures to every tracker."""
        for tracker in self.trackers:
            tracker.log(figures, step)

    def save(self, model: Transformer) -> bool:
        """Saves the weights; False if that failed. A collective call where they are sharded."""
        state = model.state_dict()
        if self.folder is None:
            return True
        return self.folder.write(WEIGHTS, lambda path: save_weights(state, path, model.config))
