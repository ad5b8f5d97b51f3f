"""A run's checkpoints: when one is due, written beside training, and old ones removed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paceline as pl
from paceline.checkpoint.exchange.export import model_of
from paceline.checkpoint.folder import CHECKPOINTS, complete_steps, folder_of, prune, set_aside, step_folder
from paceline.checkpoint.load import Loaded
from paceline.checkpoint.save import save_beside
from paceline.checkpoint.saving import Saving
from paceline.comm.world import World
from paceline.core.errors import UserError
from paceline.data.samples import LeftOut
from paceline.models.transformer import Transformer
from paceline.train.optim import Update
from paceline.train.run_folder import LINES
from paceline.train.sections import CheckpointConfig


def load_checkpoint(path: Path, model: Transformer, update: Update, text: dict[str, Any]) -> Loaded:
    """Goes on from a checkpoint, or the latest good one of a folder. A collective call.

    Args:
        path: Of it.
        model: Parallel.
        update: Gets its optimizer's states.
        text: What the run is trained on, as it is now.

    Raises:
        UserError: The text was another one.
    """
    loaded = pl.load(path, model, update.optimizer)
    # Older checkpoints know less of it.
    if (then := loaded.extra["text"]) != (now := {name: text[name] for name in then}):
        raise UserError(
            f"the text has changed since {loaded.path} was saved: {then} then, {now} now. "
            "Put back what it was, or begin a new run"
        )
    update.load_state_dict(loaded.extra["update"])
    return loaded


def left_out_of(loaded: Loaded) -> LeftOut:
    """Global batches that no step of a run takes, as its checkpoint says."""
    return tuple((step, count) for step, count in loaded.extra.get("left_out", ()))


def begin_from(path: str, model: Transformer) -> Loaded:
    """Takes the weights of a checkpoint for a new run. A collective call.

    Args:
        path: It, a folder of them, or a run's.
        model: Parallel.

    Raises:
        UserError: They are another model's.
    """
    loaded = pl.load(folder_of(path), model)
    theirs = model_of(loaded.extra)
    # What shapes do not tell. Rotary positions may go on further than they did.
    differ = [
        f"{name} {getattr(theirs, name)}, now {getattr(model.config, name)}"
        for name in ("heads", "key_value_heads", "norm", "position", "activation", "tied", "rope_theta", "norm_eps")
        if theirs is not None and getattr(theirs, name) != getattr(model.config, name)
    ]
    if differ:
        raise UserError(f"weights: {loaded.path} is of another model: {'; '.join(differ)}. Set model as it was")
    return loaded


class Checkpoints:
    """Saves one run's training state.

    Attributes:
        path: The folder that checkpoints lie in.
        left_out: Global batches that no step takes.
        since: When the latest one began, or the run, on the host's monotonic clock.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        model: Transformer,
        update: Update,
        world: World,
        text: dict[str, Any],
        first: int,
        left_out: LeftOut,
        since: float | None = None,
    ) -> None:
        """Nothing is saved yet; the clock of the next one starts, or runs on.

        Args:
            run: The run's folder, the same on every rank.
            config: When and how many.
            model: Parallel.
            update: Holds the optimizer, and what it has skipped and scaled.
            world: The job.
            text: What the run is trained on.
            first: The step that the training goes on from.
            left_out: Global batches that no step takes.
            since: When it started, if it did in an earlier job: losses that come often must not put saves off.
        """
        self.path = run / CHECKPOINTS
        self._config, self._model, self._update, self._world = config, model, update, world
        self._text, self.left_out = text, left_out
        # The latest, on every rank alike, though some end sooner.
        self._saving: Saving | None = None
        self._is_told = False
        # Those whose end is not among the figures yet; on rank 0.
        self._unlogged: list[Saving] = []
        self.since, self._last_step = time.monotonic() if since is None else since, first

    def asked(self) -> float:
        """1.0 on rank 0 when a time has come that this rank alone knows, else 0.0."""
        due = time.monotonic() - self.since > self._config.seconds
        return float(due and self._world.rank == 0 and (self._saving is None or self._saving.done))

    def save_if_due(self, step: int, asked: bool, say: Callable[[str], None], pause: Callable[[], None]) -> None:
        """Begins a checkpoint when it is time, and tells how the last one went. A collective call when it is.

        Args:
            step: How many steps were done.
            asked: Whether rank 0's clock asked for one: the same on every rank.
            say: Shows a line on rank 0.
            pause: Called before one begins, which waits for the one before: on a slow disk longer than a step takes.
        """
        self.tell(say)
        if self._config.check_replicas and step % self._config.check_replicas == 0:
            pl.check_replicas(self._model, self._update.optimizer)
        # On GPUs the answer comes a step late, when rank 0 may have asked once more.
        asked = asked and step - self._last_step > 2
        if asked or (self._config.steps and step % self._config.steps == 0):
            pause()
            failed = _failure(lambda: self._begin(step, background=True))
            if failed is not None:
                say(f"WARNING: no checkpoint of step {step}: {failed}. Training goes on")

    def save_at_end(self, step: int, say: Callable[[str], None]) -> Path | None:
        """Saves when training ends or is stopped, unless this step's was; None if it fails. A collective call."""
        if self._saving is not None:
            # What is on its way ends first; that it failed is no reason not to try again.
            if _failure(self._saving.wait) is not None:
                self._last_step = -1
            self.tell(say)
        if self._last_step == step:
            return step_folder(self.path, step)
        failed = _failure(lambda: self._begin(step, background=False))
        if failed is not None:
            say(f"WARNING: no checkpoint: {failed}")
            return None
        self.tell(say)
        return step_folder(self.path, step)

    def tell(self, say: Callable[[str], None]) -> None:
        """Says if the checkpoint that was under way failed; removes older ones if it did not."""
        saving = self._saving
        if saving is None or self._is_told or not saving.done:
            return
        self._is_told = True
        if saving.error is not None:
            say(
                f"WARNING: the checkpoint of step {saving.step} could not be saved: {saving.error}. Training goes on; "
                "the one before is as it was"
            )
        elif self._world.rank == 0:
            prune(self.path, self._config.keep, self._config.keep_every)

    def figures(self) -> list[dict[str, float | int]]:
        """Figures of each checkpoint that is under way, or has ended since this was last asked; on rank 0.

        Its step, the bytes that all ranks have written so far, how long training stood still for it and, once it
        counts, how long it took in all.
        """
        # Which are done is asked once: one that ends meanwhile is told the next time.
        done = [saving.done for saving in self._unlogged]
        told = [_figures(*each) for each in zip(self._unlogged, done, strict=True)]
        self._unlogged = [saving for saving, ended in zip(self._unlogged, done, strict=True) if not ended]
        return told

    def finish(self, say: Callable[[str], None]) -> None:
        """Waits for the checkpoint that is under way, and tells how it went. A collective call."""
        if self._saving is not None:
            _failure(self._saving.wait)
            self.tell(say)

    def extra(self) -> dict[str, Any]:
        """What is saved besides the model and the optimizer's states."""
        return {
            "model": asdict(self._model.config),
            "update": self._update.state_dict(),
            "text": self._text,
            "left_out": [list(each) for each in self.left_out],
        }

    def latest_before(self, step: int, say: Callable[[str], None]) -> int | None:
        """The step of the latest checkpoint before one; None without any. A collective call."""
        self.finish(say)
        found = [each for each in complete_steps(self.path) if each < step] if self._world.rank == 0 else []
        latest: int | None = pl.all_gather_json(max(found, default=None), "the checkpoint to go back to")[0]
        return latest

    def go_back(self, step: int) -> LeftOut:
        """Loads one of them, and sets those of later steps aside. A collective call.

        Returns:
            What was left out when it was saved.

        Raises:
            UserError: It is damaged.
        """
        if self._world.rank == 0:
            set_aside(self.path, step)
        loaded = load_checkpoint(step_folder(self.path, step), self._model, self._update, self._text)
        self._update.done = step
        self.since, self._last_step = time.monotonic(), step
        return left_out_of(loaded)

    def _begin(self, step: int, background: bool) -> None:
        if self._config.check_replicas:
            pl.check_replicas(self._model, self._update.optimizer)
        self.since, self._last_step = time.monotonic(), step
        self._is_told = False
        self._saving = save_beside(
            [self.path.parent / name for name in LINES],
            step_folder(self.path, step),
            self._model,
            self._update.optimizer,
            step,
            extra=self.extra(),
            background=background,
        )
        if self._world.rank == 0:
            self._unlogged.append(self._saving)


def _figures(saving: Saving, done: bool) -> dict[str, float | int]:
    found = {"checkpoint/step": saving.step, "checkpoint/stall_seconds": saving.stall_seconds}
    if done and saving.seconds is not None and saving.error is None:
        found["checkpoint/seconds"] = max(saving.seconds, saving.stall_seconds)
    with contextlib.suppress(OSError):
        found["checkpoint/bytes"] = sum(file.stat().st_size for file in saving.path.iterdir())
    return found


def _failure(work: Callable[[], object]) -> UserError | None:
    try:
        work()
    except UserError as error:
        return error
    return None
