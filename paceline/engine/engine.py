"""The engine: follows one model through forward, backward and update, as its schedule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from paceline.comm.plan import Traffic
from paceline.comm.world import World, all_gather_json, open_clock
from paceline.engine.agreement import agree_on_order, check_same_model
from paceline.engine.arrangement import Arrangement
from paceline.engine.buffers import Buffers
from paceline.engine.counts import Counts
from paceline.engine.executor import Executor
from paceline.engine.gradients import Gradients
from paceline.engine.hooks import in_backward, install
from paceline.engine.optimizers import watch_optimizers
from paceline.engine.progress import Progress
from paceline.engine.synchronizer import Synchronizer
from paceline.engine.units import find_units, parameter_specs
from paceline.errors import UserError
from paceline.events import Event
from paceline.layout import Layout
from paceline.schedule import Key, Op, Schedule
from paceline.strategy import Strategy


class Engine:
    """Executes the schedule of one model on one rank.

    Attributes:
        module: The user's model.
        strategy: How it is synchronised.
        world: The job.
        units: Unit modules by name.
        progress: Which step and micro-batch the training loop is in.
    """

    def __init__(self, module: nn.Module, strategy: Strategy, world: World) -> None:
        """Lays out the model, sends rank 0's weights and buffers to all, and registers hooks.

        Raises:
            UserError: Ranks built different models, or the model is on the meta device.
        """
        if any(p.is_meta for p in module.parameters()):
            raise UserError("parallelize: the model is on the meta device; give it weights first (to_empty and init)")
        module.to(world.device)
        self.module, self.strategy, self.world = module, strategy, world
        self.units = find_units(module, strategy.units)
        self._specs = parameter_specs(module, list(self.units))
        self._synchronizer: Synchronizer | None = None
        if world.world_size > 1:
            check_same_model(self._specs, module)
            self._synchronizer = Synchronizer(strategy, world)
        self._gradients: Gradients | None = None
        transport = self._synchronizer.counts_transport if self._synchronizer else None
        self._counts = Counts(len(self._specs), world.device, transport)
        self._arranged = self._arrange(tuple(self.units))
        if self._synchronizer is not None:
            self._synchronizer.broadcast_state(self._arranged.buffers.weights, list(module.buffers()))
        streams = self._synchronizer.streams if self._synchronizer else {}
        self._executor = Executor(world.rank, open_clock(world), streams, self._work)

        self.progress = Progress(world.world_size)
        self._first_order: list[str] | None = []
        self._outstanding: Counter[str] = Counter()
        self._uncollected: set[str] = set()
        install(module, self.units, self)
        watch_optimizers(self)

    # ---- what the training loop calls

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients on this rank; the next one outside reduces them all."""
        return self.progress.deferring()

    def count(self, *values: float | Tensor) -> None:
        """Adds numbers to be summed over micro-batches and ranks, called before `backward`; see `counts`."""
        self._counts.add(values)

    def counts(self) -> Tensor:
        """The sums of what `count` was given up to the last synchronised backward, over all ranks.

        Returns:
            fp64, one element per value of `count`, on the model's device.
        """
        return self._counts.result()

    def grad_norm(self) -> Tensor:
        """The 2-norm of the reduced gradients of all parameters: a 0-dim tensor, the same on every rank.

        Raises:
            EngineError: The gradients are not reduced yet.
        """
        self.progress.require_reduced("the gradient norm")
        present = [p.grad for p in self._buffers.parameters if p.grad is not None]
        norm = torch.zeros((), dtype=self._buffers.parameters[0].dtype, device=self.world.device)
        if present:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(present)))
        if self._served:
            norm.fill_(all_gather_json(norm.item())[0])
        return norm

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` belongs to the model."""
        return self._arranged.holds(identity)

    def drain_events(self) -> list[Event]:
        """The events of every op executed since the last call."""
        return self._executor.drain()

    def broadcast_buffers(self) -> None:
        """Gives every rank rank 0's buffers, such as the running statistics of BatchNorm. A collective call."""
        if self._synchronizer is not None:
            self._synchronizer.broadcast_state([], list(self.module.buffers()))

    def reset(self) -> None:
        """After an exception in forward or backward: drops the step's gradients and makes the engine usable.

        Every rank calls it. Weights are what they were before the step.
        """
        self._executor.abandon()
        self.progress.reset()
        self._outstanding.clear()
        self._uncollected.clear()
        self._counts.clear()
        for parameter in self._buffers.parameters:
            parameter.grad = None
        if self._gradients is not None:
            self._gradients.forget()

    def close(self) -> None:
        """Ends the engine's threads and connections. The model stays usable on this rank alone."""
        if self._synchronizer is not None:
            self._synchronizer.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copied or pickled model is a plain model: it has no engine."""
        return (_no_engine, ())

    # ---- what the hooks tell (hooks.Listener)

    def model_begins(self) -> None:
        """See `hooks.Listener`."""
        self._enter_forward()

    def model_ends(self) -> int:
        """See `hooks.Listener`."""
        self._executor.end()
        return self.progress.generation

    def forward_begins(self, unit: str) -> None:
        """See `hooks.Listener`."""
        self._enter_forward()
        if self._first_order is not None and unit not in self._first_order:
            self._first_order.append(unit)
        self._executor.begin(Key("forward", unit, self.progress.micro_batch))

    def forward_ends(self, unit: str) -> int:
        """See `hooks.Listener`."""
        self._outstanding[unit] += 1
        if not in_backward():
            self._executor.end()
        return self.progress.generation

    def wants_backward(self, unit: str) -> bool:
        """See `hooks.Listener`: so for a unit whose first forward ran inside a reentrant checkpoint."""
        return unit in self._uncollected and self._outstanding[unit] == 0

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """See `hooks.Listener`."""
        self.progress.require_current(generation)
        if self.progress.phase != "backward":
            self._enter_backward()
        if unit is not None:
            self._outstanding[unit] -= 1
            self._executor.begin(Key("backward", unit, self.progress.micro_batch))
            self._executor.done(self._collect(self._finished_by(unit)))

    # ---- what the optimizer's hooks tell

    def update_begins(self) -> None:
        """An optimizer that holds this model's parameters is about to step."""
        self.progress.require_reduced("optimizer.step()")
        last = self.progress.last_micro_batch
        self._executor.load(self.progress.step, self.schedule.update(last))
        self._executor.begin(Key("update", "optimizer", last))

    def update_ends(self) -> None:
        """The optimizer has stepped. With a parameter server, rank 0's weights now go to all."""
        self.progress.end_update()
        self._executor.complete()

    # ---- one micro-batch

    def _enter_forward(self) -> None:
        if self.progress.begin_forward():
            self._executor.load(self.progress.step, self.schedule.forward(self.progress.micro_batch))

    def _enter_backward(self) -> None:
        self.progress.begin_backward()
        # Queued from the outermost graph: from inside a reentrant checkpoint it would run when that one ends.
        Variable._execution_engine.queue_callback(self._leave_backward)
        self._adopt_first_order()
        if self._gradients is not None:
            self._uncollected = set(self.layout.units)
            self._gradients.begin(fresh_step=self.progress.micro_batch == 0)
        backward = self.schedule.backward(self.progress.micro_batch, self.progress.synchronises)
        self._executor.load(self.progress.step, backward)

    def _finished_by(self, unit: str) -> list[str]:
        """Units whose backward is over when that of `unit` begins: all their gradients exist."""
        after = self._arranged.units_after(unit)
        return [other for other in after if other in self._uncollected and self._outstanding[other] <= 0]

    def _collect(self, units: Sequence[str]) -> list[Key]:
        """Takes the gradients of `units` into their buckets; returns the backward ops that are thereby done."""
        if self._gradients is not None:
            for unit in reversed(units):
                self._gradients.collect(self._arranged.slots_of(unit), self.progress.synchronises)
            self._uncollected.difference_update(units)
        return [Key("backward", unit, self.progress.micro_batch) for unit in units]

    def _leave_backward(self) -> None:
        synchronises = self.progress.synchronises
        self._executor.end()
        # Not yet done, as far as the schedule goes: the counts have to be written first.
        self._collect([unit for unit in self.layout.units if unit in self._uncollected])
        late = self._gradients.late() if self._gradients and synchronises else []
        if self._gradients is not None and synchronises:
            self._gradients.used.update(late)
            self._counts.fill(self._gradients.used, late)
        self._executor.complete()
        if self._gradients is not None and synchronises:
            self._reduce_late(late, self._counts.late(late, first=self.progress.step == 0))
            used = self._gradients.used if self._gradients.complete else self._counts.used()
            self._gradients.publish(used, keep=self._keeps_gradients)
        self._counts.close(synchronises, self.world.world_size)
        self._outstanding.clear()
        self.progress.end_backward()

    def _reduce_late(self, mine: Sequence[int], anyones: Sequence[int]) -> None:
        """Reduces what came after its unit was collected; from now on these units wait for the whole backward."""
        if not anyones or self._synchronizer is None:
            return
        for bucket in self.layout.buckets:
            if not set(anyones).isdisjoint(bucket.slots):
                op = self.schedule.reduce(bucket, self.progress.micro_batch)
                self._executor.run(op, self._synchronizer.late_work(op, self._buffers, bucket, mine))
        self._arranged.mark_late(anyones)

    # ---- layout and schedule

    @property
    def layout(self) -> Layout:
        """Where parameters and gradients sit."""
        return self._arranged.layout

    @property
    def schedule(self) -> Schedule:
        """The ops of a step, read to decide what is launched when."""
        return self._arranged.schedule

    @property
    def _buffers(self) -> Buffers:
        return self._arranged.buffers

    def _arrange(self, order: tuple[str, ...]) -> Arrangement:
        # A parameter server sends the weights every step, so they lie where the transport reaches them.
        transport = self._synchronizer.transport if self._synchronizer and self._served else None
        return Arrangement(
            self.module, self._specs, self.units, order, self.strategy, self.world, self._counts.numel, transport
        )

    def _adopt_first_order(self) -> None:
        """The first forward shows in which order units really run: the same for all ranks, rank 0's."""
        if self._first_order is None:
            return
        order = tuple(agree_on_order(self._first_order, self.world))
        self._first_order = None
        if order != self.schedule.order:
            self._arranged = self._arrange(order)
        if self._synchronizer is not None:
            self._buffers.allocate_gradients(self._synchronizer.transport)
            self._gradients = Gradients(self._buffers)

    def _work(self, op: Op) -> Callable[[], Traffic]:
        assert self._synchronizer is not None
        return self._synchronizer.work(op, self._buffers, self._counts)

    @property
    def _served(self) -> bool:
        """Whether rank 0 alone gets gradients and updates."""
        return self.strategy.collective == "parameter_server" and self.world.world_size > 1

    @property
    def _keeps_gradients(self) -> bool:
        return self.world.rank == 0 or not self._served


def _no_engine() -> None:
    return None
