"""A closer look at one step: what each part adds, and what goes into each reduction."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.layout import Bucket, Slot
from paceline.engine.engine import Engine
from paceline.hooks.modules import in_backward
from paceline.verify.deviation import deviation, largest
from paceline.verify.differences import Recorder
from paceline.verify.local_shard import in_memory_order
from paceline.verify.recipe import Recipe
from paceline.verify.reference_run import Named, fingerprint


class Inspection:
    """Compares this rank's own outputs and gradients with those of the same part in the reference.

    Then what ranks send each other: the gradients as they lie in the buckets.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, recorder: Recorder, recipe: Recipe, parts: dict[str, Any]
    ) -> None:
        """Registers hooks and listens to the transports, until `close`.

        Args:
            model: Parallel.
            engine: Its engine.
            recorder: Takes the comparisons down.
            recipe: How ranks and micro-batches cut the batch.
            parts: What the reference has of the step.
        """
        self._engine, self._recorder, self._recipe = engine, recorder, recipe
        self._gradients: list[Named] = parts["gradients"]
        self._outputs: list[list[tuple[str, Tensor]]] = parts["outputs"]
        self._scale = max((largest(g) for part in self._gradients for g in part.values()), default=0.0) or 1.0
        self._calls = 0
        self._local: Named = {}
        self._sent: dict[tuple[str, str], list[Tensor]] = {}
        self._lock = threading.Lock()
        self._handles: list[Any] = [
            unit.register_forward_hook(lambda module, inputs, output, name=name: self._compare_output(name, output))
            for name, unit in engine.units.items()
        ]
        self._handles += [
            parameter.register_hook(lambda gradient, name=name: self._take(name, gradient))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self._listen()

    # ---- this rank's own

    def _part(self, rank: int, micro_batch: int) -> int:
        return rank * self._recipe.micro_batches + micro_batch

    @property
    def _mine(self) -> int:
        return self._part(self._engine.world.rank, self._recorder.micro_batch)

    def _compare_output(self, unit: str, output: Any) -> None:
        if in_backward() or not torch.is_grad_enabled():
            return
        calls = self._outputs[self._mine]
        name, expected = calls[self._calls] if self._calls < len(calls) else ("", torch.zeros(0))
        self._calls += 1
        size = math.inf
        if name == unit:
            actual = fingerprint(output)
            size = deviation(actual, expected, largest(expected) or 1.0)
        self._recorder.record("output", size, unit=unit, op="forward")

    def _take(self, name: str, gradient: Tensor) -> None:
        # In parts where the parameter is used in several reentrant checkpoints.
        known = self._local.get(name)
        self._local[name] = gradient.detach().clone() if known is None else known.add_(gradient)

    def end_micro_batch(self) -> None:
        """Compares gradients once a backward is over, in the order in which they came."""
        expected = self._gradients[self._mine]
        units = {slot.spec.name: slot.spec.unit for slot in self._engine.layout.slots}
        for name in dict.fromkeys((*self._local, *expected)):
            actual, wanted = self._local.get(name), expected.get(name)
            size = math.inf if actual is None or wanted is None else deviation(actual, wanted, self._scale)
            self._recorder.record("local", size, name, units[name], op="backward")
        self._local.clear()
        self._calls = 0

    # ---- what is sent

    def _listen(self) -> None:
        """Copies what goes into every reduction. The transports are the one place where all of it passes."""
        collectives = self._engine.program.collectives
        self._transports = collectives.transports if collectives is not None else {}
        for stream in {"reduce", "replicate"} & self._transports.keys():
            run = self._transports[stream].run

            def listening(
                collective: str,
                buffer: Tensor,
                label: str,
                *rest: Any,
                stream: str = stream,
                run: Any = run,
                **named: Any,
            ) -> Any:
                if collective != "broadcast":
                    with self._lock:
                        # A label may say more than which bucket it is.
                        self._sent.setdefault((stream, label.split(", ")[0]), []).append(buffer.clone())
                return run(collective, buffer, label, *rest, **named)

            vars(self._transports[stream])["run"] = listening

    def _compare_sent(self) -> None:
        """Compares what went into the reductions, once all is over: one may run into the next micro-batch."""
        rank, schedule = self._engine.world.rank, self._engine.schedule
        buckets = {bucket.name: bucket for bucket in self._engine.layout.buckets}
        count = self._recipe.micro_batches
        for (stream, target), buffers in self._sent.items():
            each = stream == "reduce" and self._engine.strategy.reduces_every_micro_batch
            spans = [range(index, index + 1) for index in range(count)] if each else [range(count)]
            for again in buffers[len(spans) :]:
                # A second reduction in the last backward, of gradients that came after their copy-in.
                buffers[len(spans) - 1].add_(again)
            for span, buffer in zip(spans, buffers, strict=False):
                self._recorder.micro_batch = span[-1]
                if stream == "reduce":
                    self._compare_copied_in(buckets[target], buffer, [self._part(rank, index) for index in span])
                else:
                    group = range(rank - rank % schedule.shards, rank - rank % schedule.shards + schedule.shards)
                    parts = [self._part(other, index) for other in group for index in span]
                    self._compare_reduced(buckets[target], buffer, parts)

    def _sum(self, slot: Slot, parts: Iterable[int]) -> Tensor:
        """A parameter's gradient in the reference, summed over parts, in the order of the flat buffer."""
        terms = [self._gradients[part][slot.spec.name] for part in parts if slot.spec.name in self._gradients[part]]
        if not terms:
            return torch.zeros(slot.spec.numel, dtype=torch.float64)
        return in_memory_order(torch.stack(terms).sum(0), slot.spec)

    def _compare_copied_in(self, bucket: Bucket, buffer: Tensor, parts: Iterable[int]) -> None:
        for index in bucket.slots:
            slot = self._engine.layout.slots[index]
            actual = buffer[slot.offset - bucket.start : slot.stop - bucket.start]
            size = deviation(actual, self._sum(slot, parts), self._scale)
            self._recorder.record("copied in", size, slot.spec.name, slot.spec.unit, bucket.name, "copy_in")

    def _compare_reduced(self, bucket: Bucket, buffer: Tensor, parts: Iterable[int]) -> None:
        schedule = self._engine.schedule
        mine = self._engine.world.rank % schedule.shards
        for index in bucket.slots:
            slot = self._engine.layout.slots[index]
            start, stop = self._engine.layout.shard_of(bucket, index, mine, schedule.shards)
            first = bucket.shard(mine, schedule.shards)[0]
            expected = self._sum(slot, parts)[start - slot.offset : stop - slot.offset] / self._engine.world.world_size
            size = deviation(buffer[start - first : stop - first], expected, self._scale)
            op = schedule.reduce(bucket, self._recorder.micro_batch)[0].kind
            self._recorder.record("reduced", size, slot.spec.name, slot.spec.unit, bucket.name, op)

    def close(self) -> None:
        """Ends the inspection after the step's last backward."""
        self._compare_sent()
        for handle in self._handles:
            handle.remove()
        for transport in self._transports.values():
            vars(transport).pop("run", None)
