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
from paceline.engine.progress import EngineError, Progress
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
        self._gradients: Gradients | None = None
        if world.world_size > 1:
            check_same_model(self._specs, module, strategy)
        self._open()
        self._arranged = self._arrange(tuple(self.units))
        if self._synchronizer is not None:
            self._synchronizer.broadcast_state(self._arranged.buffers.weights, list(module.buffers()))
        self.progress = Progress(world.world_size)
        self._first_order: list[str] | None = []
        self._outstanding: Counter[str] = Counter()
        self._uncollected: set[str] = set()
        self._begun: set[str] = set()
        self._ignored_pass = -1
        self._handles = [*install(module, self.units, self), *watch_optimizers(self)]

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
        self._require_reduced("the gradient norm")
        present = [p.grad for p in self._buffers.parameters if p.grad is not None]
        dtypes = [getattr(torch, spec.dtype) for spec in self._specs[:1]]
        norm = torch.zeros((), dtype=dtypes[0] if dtypes else None, device=self.world.device)
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

        A collective call. Ranks may have failed in different places: collectives that some began and others did not
        end with their connections, and new ones are opened. Weights are what they were before the step.
        """
        self.progress.reset()
        self._outstanding.clear()
        self._uncollected.clear()
        for parameter in self._buffers.parameters:
            parameter.grad = None
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._open()
            if self._served:
                self._arranged = self._arrange(self.schedule.order)
            if self._gradients is not None:
                self._allocate_gradients()
        else:
            self._open()

    def close(self) -> None:
        """Ends the engine: hooks, threads and connections. The model is then a plain one on this rank."""
        for handle in self._handles:
            handle.remove()
        if self._synchronizer is not None:
            self._synchronizer.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A deep copy of a parallel model is a plain model: it has no engine."""
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

    def in_forward(self) -> bool:
        """See `hooks.Listener`."""
        return self.progress.phase == "forward"

    def forward_ends(self, unit: str, backward_follows: bool) -> int:
        """See `hooks.Listener`."""
        self._outstanding[unit] += backward_follows
        if not in_backward():
            self._executor.end()
        return self.progress.generation

    def wants_backward(self, unit: str) -> bool:
        """See `hooks.Listener`: so for a unit whose first forward ran inside a reentrant checkpoint."""
        return unit in self._uncollected and unit not in self._begun and self._outstanding[unit] == 0

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """See `hooks.Listener`."""
        if self.progress.phase != "backward" and not self._is_backward():
            return
        self.progress.require_current(generation)
        if self.progress.phase != "backward":
            self._enter_backward()
        if unit is not None:
            self._begun.add(unit)
            self._outstanding[unit] -= 1
            self._executor.begin(Key("backward", unit, self.progress.micro_batch))
            self._executor.done(self._collect(self._finished_by(unit)))

    # ---- what the optimizer's hooks tell

    def update_begins(self) -> None:
        """An optimizer that holds this model's parameters is about to step."""
        self._require_reduced("optimizer.step()")
        self._executor.begin(Key("update", "optimizer", self.progress.last_micro_batch))

    def update_ends(self) -> None:
        """The optimizer has stepped. With a parameter server, rank 0's weights now go to all."""
        self._executor.end()
        # Loaded only now: a closure may have run whole forward and backward passes inside the step.
        self._executor.load(self.progress.step, self.schedule.update(self.progress.last_micro_batch))
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
        self._begun.clear()
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
        elif self._gradients is not None:
            self._gradients.end_local()
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
        self._allocate_gradients()

    def _allocate_gradients(self) -> None:
        if self._synchronizer is not None:
            self._buffers.allocate_gradients(self._synchronizer.transport)
            self._gradients = Gradients(self._buffers)

    def _open(self) -> None:
        """Opens streams and connections, with nothing under way on them."""
        self._synchronizer = Synchronizer(self.strategy, self.world) if self.world.world_size > 1 else None
        transport = self._synchronizer.counts_transport if self._synchronizer else None
        self._counts = Counts(len(self._specs), self.world.device, transport)
        streams = self._synchronizer.streams if self._synchronizer else {}
        self._executor = Executor(self.world.rank, open_clock(self.world), streams, self._work)

    def _work(self, op: Op) -> Callable[[], Traffic]:
        assert self._synchronizer is not None
        return self._synchronizer.work(op, self._buffers, self._counts)

    def _is_backward(self) -> bool:
        """Whether the pass that begins leaves gradients in parameters; if not, all of its hooks are passed over."""
        self._arranged.require_unchanged()
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._ignored_pass and not self._arranged.differentiates_parameters():
            self._ignored_pass = this_pass
        return this_pass != self._ignored_pass

    def _require_reduced(self, what: str) -> None:
        """Refuses to use gradients that are partial, this rank's own, or of a backward that the hooks did not see."""
        self.progress.require_reduced(what)
        if self.world.world_size == 1 or self.progress.reduced:
            return
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self._buffers.parameters, strict=True)):
            reduced = self._gradients is not None and self._gradients.holds(index)
            if parameter.grad is not None and not reduced:
                raise EngineError(
                    f"{what}: {slot.spec.name} has a gradient of a backward that paceline did not see, so it is this "
                    "rank's own. Compute the loss from what model(...) returns; units that only run inside a reentrant "
                    "checkpoint around the whole model are not seen either"
                )

    @property
    def _served(self) -> bool:
        """Whether rank 0 alone gets gradients and updates."""
        return self.strategy.collective == "parameter_server" and self.world.world_size > 1

    @property
    def _keeps_gradients(self) -> bool:
        return self.world.rank == 0 or not self._served


def _no_engine() -> None:
    return None
