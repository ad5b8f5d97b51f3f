"""One rank of a parallel job that trains with the engine and compares all it has with the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline as pl
from paceline.core.layout import Slot
from paceline.core.strategy import Strategy
from paceline.engine.engine import Engine
from paceline.hooks.modules import in_backward
from paceline.verify.deviation import deviation, largest
from paceline.verify.differences import Kind, Recorder, Report
from paceline.verify.inspection import Inspection
from paceline.verify.local_shard import bucket_of, local_shard
from paceline.verify.model_spec import ModelSpec, compute_loss, find_loss, make_model, share
from paceline.verify.recipe import LEARNING_RATE, Recipe, make_optimizer
from paceline.verify.reference_run import batches_file, load_tensors, parts_file, step_file

SMALL_LOSS = 1e-3
"""Losses below are compared as if they were this large."""


@dataclass(frozen=True)
class Case:
    """One way to train in parallel, and what it is held against."""

    strategy: Strategy
    recipe: Recipe
    tolerance: float
    """Largest relative difference that counts as equal."""


def train_parallel(spec: ModelSpec, case: Case, folder: Path, inspect: int | None = None) -> Report:
    """Trains this rank's part and compares every step with the reference's files.

    Ranks other than 0 build the model from another seed, as in a job where nobody set one: its weights then come from
    rank 0, and all that is not sent shows.

    Args:
        spec: What is trained.
        case: How.
        folder: Where the reference is.
        inspect: A step of which the reference has the parts: there the causes of a difference are looked for.
    """
    world = pl.init(device="cpu")
    model = make_model(spec, seed=0 if world.rank == 0 else 1000 + world.rank)
    pl.parallelize(model, case.strategy)
    rank = _Rank(model, case, folder)
    optimizer = make_optimizer(model.parameters())
    loss = find_loss(spec)
    for step, batch in enumerate(load_tensors(batches_file(folder))[: case.recipe.steps]):
        rank.begin_step(step, inspect)
        for index, mine in enumerate(pl.accumulate(model, rank.shares(batch))):
            rank.recorder.micro_batch = index
            value = compute_loss(model, mine, loss)
            rank.compare_loss(value)
            rank.engine.count(value)
            (value / case.recipe.micro_batches).backward()
            rank.end_backward()
        rank.compare_gradients()
        rank.compare_norm(pl.clip_grad_norm_(model, case.recipe.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        rank.end_step()
    rank.compare_full_parameters()
    pl.release(model)
    return rank.recorder.report()


class _Rank:
    """Holds one rank's training against the reference."""

    def __init__(self, model: nn.Module, case: Case, folder: Path) -> None:
        self.engine = pl.engine_of(model)
        self.recorder = Recorder(self.engine.world.rank, case.tolerance)
        self._model, self._recipe, self._folder = model, case.recipe, folder
        self._parameters = dict(model.named_parameters())
        self._expected: Any = None
        self._inspection: Inspection | None = None
        _watch_forward(model, self.engine, self.compare_weights)

    def shares(self, batch: Any) -> list[Any]:
        """This rank's micro-batches."""
        count = self._recipe.micro_batches
        first = self.engine.world.rank * count
        return [share(batch, first + index, self._recipe.ranks * count) for index in range(count)]

    def begin_step(self, step: int, inspect: int | None) -> None:
        """Opens the reference's record of a step."""
        self.recorder.step, self.recorder.micro_batch = step, 0
        self._expected = load_tensors(step_file(self._folder, self._recipe, step))
        if step == inspect:
            parts = load_tensors(parts_file(self._folder, self._recipe, step))
            self._inspection = Inspection(self._model, self.engine, self.recorder, self._recipe, parts)

    def compare_weights(self, units: Iterable[str]) -> None:
        """Parameters as units compute with them."""
        chosen = set(units)
        for slot in self.engine.layout.slots:
            if slot.spec.unit in chosen:
                # In low precision units compute with copies.
                self._compare_weight("weights", slot, self._expected["weights"][slot.spec.name], copied=True)

    def compare_loss(self, value: torch.Tensor) -> None:
        """The loss of this rank's micro-batch."""
        expected = self._expected["losses"][
            self.engine.world.rank * self._recipe.micro_batches + self.recorder.micro_batch
        ]
        self.recorder.record("loss", _relative(value.item(), expected, SMALL_LOSS), op="forward")

    def end_backward(self) -> None:
        """A micro-batch is over."""
        if self._inspection is not None:
            self._inspection.end_micro_batch()

    def compare_gradients(self) -> None:
        """Reduced gradients, or this rank's shards of them, and the sum of all losses."""
        if self._inspection is not None:
            self._inspection.close()
            self._inspection = None
        losses = self._expected["losses"]
        self.recorder.record(
            "loss", _relative(self.engine.counts().item(), sum(losses), SMALL_LOSS), op="all_reduce of the counts"
        )
        if not self._holds_gradients:
            return
        for index, slot in enumerate(self.engine.layout.slots):
            expected = self._expected["gradients"].get(slot.spec.name)
            actual = self._parameters[slot.spec.name].grad
            size = 0.0
            if expected is not None:
                mine = local_shard(self.engine, index, expected)
                if mine.numel():
                    scale = max(self._expected["scale"], 1e-30)
                    size = math.inf if actual is None else deviation(actual.as_subclass(torch.Tensor), mine, scale)
            elif actual is not None:
                size = math.inf
            bucket = bucket_of(self.engine, index)
            ops = self.engine.schedule.reduce(bucket, 0) if bucket is not None and slot.spec.trainable else ()
            self.recorder.record(
                "gradient",
                size,
                slot.spec.name,
                slot.spec.unit,
                bucket.name if bucket else "",
                ops[-1].kind if ops else "",
            )

    @property
    def _holds_gradients(self) -> bool:
        """Whether this rank gets gradients; with a parameter server only rank 0 does."""
        return self.engine.strategy.collective != "parameter_server" or self.engine.world.rank == 0

    def compare_norm(self, norm: torch.Tensor) -> None:
        """The norm over all parameters."""
        self.recorder.record("norm", _relative(norm.item(), self._expected["norm"], 1e-30))

    def end_step(self) -> None:
        """Parameters, or this rank's shards of them, after the update."""
        self._expected = load_tensors(step_file(self._folder, self._recipe, self.recorder.step + 1))
        for index, slot in enumerate(self.engine.layout.slots):
            expected = local_shard(self.engine, index, self._expected["weights"][slot.spec.name])
            op, local = "broadcast", None
            if self._holds_gradients:
                # What others update is on its way: reading the parameter waits for it.
                op, local = "update", self.engine.program.parameters.flat.local.get(index)
            self._compare_weight("updated", slot, expected, op=op, actual=local)

    def compare_full_parameters(self) -> None:
        """Whole parameters after the last step."""
        self.recorder.step, self.recorder.micro_batch = self._recipe.steps, 0
        with self.engine.full_parameters():
            for slot in self.engine.layout.slots:
                self._compare_weight("weights", slot, self._expected["weights"][slot.spec.name])

    def _compare_weight(
        self,
        kind: Kind,
        slot: Slot,
        expected: torch.Tensor,
        copied: bool = False,
        op: str = "",
        actual: torch.Tensor | None = None,
    ) -> None:
        actual = self._parameters[slot.spec.name] if actual is None else actual
        if copied or not slot.spec.trainable:
            # Of a frozen parameter there is nothing but the copy, in whatever dtype it is shown.
            expected = expected.to(getattr(torch, self.engine.layout.flats[slot.flat].dtype))
        size = deviation(actual, expected, max(largest(expected), LEARNING_RATE))
        bucket = bucket_of(self.engine, self.engine.layout.slots.index(slot))
        gathered = self.engine.schedule.shards > 1 and bucket is not None
        self.recorder.record(
            kind,
            size,
            slot.spec.name,
            slot.spec.unit,
            bucket.name if bucket else "",
            op or ("all_gather" if gathered else ""),
        )


def _watch_forward(model: nn.Module, engine: Engine, compare: Any) -> None:
    """Calls `compare(units)` where training forwards begin to compute with the parameters of units.

    Registered after the engine's own hooks, which make the parameters whole.
    """

    def model_begins(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            # Those that no unit's forward announces.
            compare(set(engine.layout.units) - set(engine.units))

    model.register_forward_pre_hook(model_begins)
    for name, unit in engine.units.items():

        def unit_begins(module: nn.Module, inputs: Any, name: str = name) -> None:
            if torch.is_grad_enabled() and not in_backward():
                compare((name,))

        unit.register_forward_pre_hook(unit_begins)


def _relative(actual: float, expected: float, smallest: float) -> float:
    difference = abs(actual - expected) / max(abs(expected), smallest)
    return math.inf if math.isnan(difference) else difference
