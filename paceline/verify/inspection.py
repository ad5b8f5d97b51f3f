"""A closer look at one step: what each part adds, and what goes into each reduction."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.engine import Engine
from paceline.engine.hooks import in_backward
from paceline.layout import Bucket
from paceline.verify.alone import Named, fingerprint
from paceline.verify.evidence import Ledger
from paceline.verify.measure import deviation, in_memory_order, largest
from paceline.verify.recipe import Recipe


class Inspection:
    """Compares this rank's own outputs and gradients with those of the same part in the reference.

    Then what ranks send each other: the gradients as they lie in the buckets.
    """

    def __init__(self, model: nn.Module, engine: Engine, ledger: Ledger, recipe: Recipe, parts: dict[str, Any]) -> None:
        """Registers hooks and listens to the transports, until `close`.

        Args:
            model: Parallel.
            engine: Its engine.
            ledger: Takes the comparisons down.
            recipe: How ranks and micro-batches cut the batch.
            parts: What the reference has of the step.
        """
        self._engine, self._ledger, self._recipe = engine, ledger, recipe
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
        return self._part(self._engine.world.rank, self._ledger.micro_batch)

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
        self._ledger.note("output", size, unit=unit, op="forward")

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
            self._ledger.note("local", size, name, units[name], op="backward")
        self._local.clear()
        self._calls = 0

    # ---- what is sent

    def _listen(self) -> None:
        """Copies what goes into every reduction. The transports are the one place where all of it passes."""
        synchronizer = self._engine.running.synchronizer
        self._transports = synchronizer.transports if synchronizer is not None else {}
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
                        self._sent.setdefault((stream, label), []).append(buffer.clone())
                return run(collective, buffer, label, *rest, **named)

            vars(self._transports[stream])["run"] = listening

    def _compare_sent(self) -> None:
        """Once all is over, as a reduction may run into the next micro-batch."""
        last, buckets = self._ledger.micro_batch, {bucket.name: bucket for bucket in self._engine.layout.buckets}
        for (stream, target), buffers in self._sent.items():
            reductions = last + 1 if stream == "reduce" and self._engine.strategy.reduces_each else 1
            for late in buffers[reductions:]:
                # A second reduction in the same backward, of gradients that came late.
                buffers[reductions - 1].add_(late)
            for index, buffer in enumerate(buffers[:reductions]):
                self._ledger.micro_batch = index + last + 1 - reductions
                if stream == "reduce":
                    self._compare_collected(buckets[target], buffer, range(index if reductions > 1 else 0, self._ledger.micro_batch + 1))
                else:
                    self._compare_reduced(buckets[target], buffer)
        self._ledger.micro_batch = last

    def _sum(self, name: str, ranks: Iterable[int], micro_batches: Iterable[int]) -> Tensor | None:
        """A parameter's gradient in the reference, summed over some parts."""
        terms = [self._gradients[self._part(rank, index)].get(name) for rank in ranks for index in micro_batches]
        present = [term for term in terms if term is not None]
        return torch.stack(present).sum(0) if present else None

    def _compare_collected(self, bucket: Bucket, buffer: Tensor) -> None:
        rank = self._engine.world.rank
        for index in bucket.slots:
            slot = self._engine.layout.slots[index]
            actual = buffer[slot.offset - bucket.start : slot.stop - bucket.start]
            wanted = self._sum(slot.spec.name, range(rank, rank + 1))
            expected = torch.zeros_like(actual) if wanted is None else in_memory_order(wanted, slot.spec)
            size = deviation(actual, expected, self._scale)
            self._ledger.note("collected", size, slot.spec.name, slot.spec.unit, bucket.name, "collect")

    def _compare_reduced(self, bucket: Bucket, buffer: Tensor) -> None:
        schedule, rank = self._engine.schedule, self._engine.world.rank
        first = rank - rank % schedule.shards
        for index in bucket.slots:
            slot = self._engine.layout.slots[index]
            start, stop = self._engine.layout.piece(bucket, index, rank % schedule.shards, schedule.shards)
            begin = bucket.shard(rank % schedule.shards, schedule.shards)[0]
            wanted = self._sum(slot.spec.name, range(first, first + schedule.shards))
            actual = buffer[start - begin : stop - begin]
            expected = torch.zeros_like(actual)
            if wanted is not None:
                whole = in_memory_order(wanted, slot.spec) / self._engine.world.world_size
                expected = whole[start - slot.offset : stop - slot.offset]
            size = deviation(actual, expected, self._scale)
            op = schedule.reduce(bucket, self._ledger.micro_batch)[0].kind
            self._ledger.note("reduced", size, slot.spec.name, slot.spec.unit, bucket.name, op)

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        for transport in self._transports.values():
            vars(transport).pop("run", None)
