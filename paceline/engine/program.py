"""A model's schedule with the tensors that it runs on, the ranks it runs between, and what executes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.buffers.memory import Tensors
from paceline.buffers.parameters import Parameters
from paceline.comm.agreement import check_same_model
from paceline.comm.connect import open_clock
from paceline.comm.transport import Transport
from paceline.comm.world import World
from paceline.core.buffers import statistics_numel
from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.collectives.rounds import Traffic
from paceline.core.layout import ROOT, Bucket, Layout
from paceline.core.ops import STATISTICS, Key, Op, Phase
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy
from paceline.engine.gradients import Gradients
from paceline.executor.collectives import Collectives
from paceline.executor.executor import Executor
from paceline.executor.gradient_norms import NormRecords
from paceline.executor.memory_meter import reader
from paceline.executor.module_buffers import ModuleBuffers, send_first_ranks
from paceline.executor.recorder import Recorder
from paceline.executor.statistics import Statistics
from paceline.hooks.other_models import OtherModels
from paceline.hooks.structure import Structure
from paceline.materialise.materialiser import Materialiser
from paceline.models.units import named_parameters, parameter_specs
from paceline.optimizers.sparse_gradients import SparseGradients
from paceline.tensors.sharded_parameter import Owner


class Program:
    """One model laid out on one rank: the schedule of its steps, and everything that its ops name.

    Attributes:
        module: The model.
        world: The job.
        schedule: The ops of a step, and its buffers.
        collectives: Carries out collectives; None with one rank.
        parameters: The user's parameters, in their buffers.
        gradients: In their buckets; None before the first backward, and where nothing has to be moved.
        statistics: What ranks agree on.
        module_buffers: The model's buffers.
        others: Have some of its parameters, which are left out of all that follows.
        tables: Notes which rows of tables get sparse gradients.
        structure: What the model was made of.
        specs: The model's parameters, in registration order.
        executor: Launches and records ops.
        recorder: Reads what the executor keeps.
        norms: Takes norms of gradients where it is asked to.
        lock: Held by the thread that the hooks tell something in.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[str],
        strategy: Strategy,
        world: World,
        owner: Owner,
        others: OtherModels[Any],
        materialiser: Materialiser | None = None,
    ) -> None:
        """Opens connections, sends rank 0's weights and buffers to all, and lays the model out. A collective call.

        Args:
            module: The model.
            units: Names of its units.
            strategy: How it is synchronised.
            world: The job.
            owner: Is asked before a sharded parameter is used.
            others: Have some of its parameters, which are left out.
            materialiser: Makes the model, where it is on the meta device.
        """
        self.world, self.lock = world, threading.RLock()
        # On the host's clock that costs next to nothing; on a GPU each op takes two events and more.
        self.recorder = Recorder(is_on=world.device.type == "cpu")
        self.module, self._units, self._owner, self.others = module, tuple(units), owner, others
        self.specs = parameter_specs(module, self._units, others)
        self.norms = NormRecords(len(self.specs))
        self.gradients: Gradients | None = None
        self.schedule = self._schedule(strategy, self._units)
        self.collectives: Collectives | None = None
        if world.world_size > 1:
            check_same_model(self.specs, module, strategy)
            self.collectives = Collectives(self.schedule, world)
            if materialiser is None:
                self._send([p.data for _, p in named_parameters(module) if p not in others])
            others.equalise(self._send)
        try:
            turns = materialiser.turns(self._send) if materialiser is not None else None
            self._lay_out(dict(named_parameters(self.module)), turns)
        except Exception as error:
            # A module's own initialisation raises what it likes, and the other ranks wait for this one.
            if self.collectives is not None:
                self.collectives.give_up(error)
            raise
        send_first_ranks(module.buffers(), self._send)
        self.module_buffers = ModuleBuffers(module, world.device)
        self.tables = SparseGradients(module, self.parameters.all if world.world_size > 1 else ())
        self._tensors.allocate(self.schedule.buffers(), "statistics")
        buffer = self._tensors.by_name.get("statistics")
        if buffer is None:
            buffer = torch.zeros(statistics_numel(len(self.specs)), dtype=torch.float64, device=world.device)
        self.statistics = Statistics(len(self.specs), world.world_size, buffer)
        self.start()

    def _schedule(self, strategy: Strategy, order: tuple[str, ...]) -> Schedule:
        # Units that do not run on their own come first: their gradients are complete last.
        idle = [unit for unit in (ROOT, *self._units) if unit not in order]
        layout = build_layout(self.specs, [*idle, *order], strategy, self.world.world_size)
        size = statistics_numel(len(self.specs))
        return build_schedule(layout, strategy, self.world.world_size, self.world.rank, order, statistics=size)

    def _send(self, tensors: Iterable[Tensor]) -> None:
        """Gives every rank rank 0's tensors."""
        if self.collectives is not None:
            self.collectives.broadcast(tensors, "pl.parallelize")

    def _lay_out(
        self, by_name: Mapping[str, nn.Parameter], turns: Iterable[Iterable[nn.Parameter]] | None = None
    ) -> None:
        self._tensors = Tensors(self._transports, self.world.device)
        parameters = [by_name[slot.spec.name] for slot in self.layout.slots]
        self.parameters = Parameters(self.schedule, parameters, self.world.device, self._tensors, self._owner, turns)
        index_of, embeddings = self.parameters.flat.index_of, (nn.Embedding, nn.EmbeddingBag)
        renorming = (m for m in self.module.modules() if isinstance(m, embeddings) and m.max_norm is not None)
        self.parameters.flat.renormed = {index_of[id(m.weight)] for m in renorming if id(m.weight) in index_of}
        self.structure = Structure(self.module, self.layout, parameters, self.parameters.flat.is_sharded, self.others)
        self._slots = {unit: self.layout.slots_of(unit) for unit in self.layout.units}

    def _transports(self) -> Mapping[str, Transport]:
        return self.collectives.transports if self.collectives else {}

    @property
    def layout(self) -> Layout:
        """Where parameters and gradients sit."""
        return self.schedule.layout

    @property
    def strategy(self) -> Strategy:
        """The strategy by which the model is synchronised."""
        return self.schedule.strategy

    def slots_of(self, unit: str) -> tuple[int, ...]:
        """Indices of the slots of a unit."""
        return self._slots[unit]

    # ---- the order of units

    def adopt(self, order: tuple[str, ...]) -> None:
        """Schedules the forward order that was seen. A collective call where ranks communicate."""
        if order == self.schedule.order:
            return
        if self.parameters.flat.managed:
            # Shards stay where they are, for an optimizer may have made its states for them; slots stay until asked.
            self.schedule = replace(self.schedule, order=order, deferred=frozenset())
        else:
            statistics = self._tensors.by_name.get("statistics")
            # Not of the model, whose parts may have been moved since.
            by_name = {slot.spec.name: p for slot, p in zip(self.layout.slots, self.parameters.all, strict=True)}
            self.schedule = self._schedule(self.strategy, order)
            self._lay_out(by_name)
            if statistics is not None:
                self._tensors.by_name["statistics"] = statistics

    def defer(self, units: Collection[str]) -> None:
        """From now on the gradients of these units are copied in after the whole backward."""
        self.schedule = replace(self.schedule, deferred=self.schedule.deferred | set(units))

    def allocate_gradients(self) -> None:
        """Allocates buckets of gradients, as the schedule places them. A collective call where ranks communicate."""
        if self.gradients is not None:
            self.gradients.replace(self.schedule, self.parameters, self._tensors)
        elif self.schedule.copies_gradients:
            self.gradients = Gradients(
                self.schedule, self.parameters, self._tensors, self._wait_for_reduction, self.norms
            )

    def assign_slots(self) -> None:
        """Gives gathered units the slots that the order they run in decides."""
        self.parameters.assign_slots(self.schedule)
        self.parameters.rest()

    # ---- execution

    def start(self) -> None:
        """Starts executing, with nothing under way."""
        streams = self.collectives.streams if self.collectives else {}
        self.executor: Executor = Executor(
            self.world.rank,
            open_clock(self.world),
            streams,
            self.work,
            self.recorder.is_on,
            reader(self.world.device),
            self.schedule.of_step_before,
        )
        self.recorder.attach(self.executor)

    def computing(self, kind: Literal["forward", "backward"], unit: str, micro_batch: int) -> Key:
        """The name of a unit's computing, which the executor knows from then on."""
        key = Key(kind, unit, micro_batch, kind)
        if not self.executor.knows(key):
            self.executor.admit(self.schedule.unforeseen(kind, unit, micro_batch))
        return key

    def _wait_for_reduction(self, bucket: Bucket) -> None:
        self.executor.require_reduced(bucket.name)

    def send_buffers(self, micro_batch: int, phase: Phase) -> None:
        """Sends rank 0's buffers, where forwards have changed some. A collective call."""
        if self.collectives is not None:
            self.module_buffers.send(self.schedule, self.executor, self.collectives, micro_batch, phase)

    def sum(self, numbers: Tensor, what: str, micro_batch: int, phase: Phase) -> None:
        """Sums fp64 numbers over all ranks, in place. A collective call."""
        if self.collectives is not None and len(numbers):
            op = self.schedule.sum_numbers(what, micro_batch, phase, len(numbers))
            self.executor.run([op], self.collectives.carry_out(op, numbers, None))

    def work(self, op: Op) -> Callable[[], Traffic]:
        """The function that performs one collective of the schedule."""
        if torch.is_inference_mode_enabled():
            # What it makes could not be written to outside of it.
            with torch.inference_mode(False):
                return self.work(op)
        assert self.collectives is not None
        parameters, carry_out = self.parameters, self.collectives.carry_out
        if op.target == STATISTICS:
            return carry_out(op, self.statistics.buffer, None)
        if op.kind == "barrier":
            return self.collectives.pass_barrier(op)
        bucket, contents = parameters.flat.buckets[op.target], parameters.flat.contents[op.target]
        if op.kind == "broadcast":
            return carry_out(op, parameters.flat.whole(bucket), contents)
        if op.kind == "all_gather":
            whole, shard = parameters.begin_gather(bucket)
            return carry_out(op, whole, contents, shard=shard)
        gradients = self.gradients
        assert gradients is not None
        if op.stream == "replicate":
            return carry_out(op, gradients.flat.reduced(bucket), contents)
        return carry_out(
            op,
            gradients.flat.whole(bucket),
            contents,
            # So that ranks with different numbers of micro-batches find out.
            label=f"{op.target}, last micro-batch"
            if self.strategy.reduces_every_micro_batch and gradients.synchronises
            else "",
            scale=self.schedule.scale,
            shard=gradients.flat.destination(bucket),
            then=gradients.flat.after_reduction(bucket),
        )

    @torch.inference_mode(False)
    def gather_into(self, op: Op, bucket: Bucket, memory: Tensor) -> Callable[[], Traffic]:
        """The function that gathers a bucket's parameters into memory of its own."""
        assert self.collectives is not None
        return self.collectives.carry_out(
            op, memory, self.parameters.flat.contents[bucket.name], shard=self.parameters.flat.shard(bucket)
        )

    def reduce_again(self, bucket: Bucket, indices: Collection[int], micro_batch: int) -> None:
        """Reduces gradients that came after their bucket was, and adds them to it. A collective call.

        Args:
            bucket: Holds a parameter that some rank has such a gradient for.
            indices: Of parameters that this rank has such a gradient for.
            micro_batch: Number within the step.
        """
        collectives, gradients = self.collectives, self.gradients
        assert collectives is not None and gradients is not None
        whole = gradients.flat.whole(bucket)
        spare = collectives.transports["reduce"].allocate(bucket.numel, whole.dtype)
        gradients.copy_in_again(bucket, indices, spare)
        own = gradients.flat.own(bucket, spare)
        first, *between = self.schedule.reduce_again(bucket, micro_batch)
        contents = self.parameters.flat.contents[bucket.name]
        self.executor.run([first], collectives.carry_out(first, spare, contents, scale=self.schedule.scale))
        for op in between:
            self.executor.run([op], collectives.carry_out(op, own, contents))
        with torch.no_grad():
            gradients.flat.reduced(bucket).add_(own)
