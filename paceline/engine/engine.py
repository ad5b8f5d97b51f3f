"""The engine: follows one model through forward, backward and update, as its schedule says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from paceline.comm.plan import Traffic
from paceline.comm.world import World, open_clock
from paceline.engine.agreement import agree_on_order, check_same_model
from paceline.engine.arrangement import Arrangement
from paceline.engine.counts import Counts
from paceline.engine.executor import Executor
from paceline.engine.gradients import Gradients, square_sum
from paceline.engine.hooks import cast_inputs, in_backward, install, open_for_states
from paceline.engine.optimizers import prepare_optimizer, watch_optimizers
from paceline.engine.progress import EngineError, Progress
from paceline.engine.recompute import recompute
from paceline.engine.synchronizer import Synchronizer
from paceline.engine.units import find_blocks, find_units, parameter_specs
from paceline.engine.weights import Weights, alone_on
from paceline.errors import UserError
from paceline.events import Event
from paceline.layout import Layout
from paceline.schedule import COUNTS, Key, Op, Phase, Schedule
from paceline.strategy import Strategy


class _Handle(Protocol):
    def remove(self) -> None: ...


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
        strategy.shards(world.world_size)
        module.to(world.device)
        self.module, self.strategy, self.world = module, strategy, world
        self.units = find_units(module, strategy.units)
        self._specs = parameter_specs(module, list(self.units))
        self._gradients: Gradients | None = None
        self._synchronizer: Synchronizer | None = None
        if world.world_size > 1:
            check_same_model(self._specs, module, strategy)
            self._synchronizer = Synchronizer(strategy, world)
            self._synchronizer.broadcast([p.data for p in module.parameters()])
            self._synchronizer.broadcast(module.buffers())
        transport = self._synchronizer.transports["counts"] if self._synchronizer else None
        self._counts = Counts(len(self._specs), world.device, transport)
        self._arranged = self._arrange(tuple(self.units))
        self._weights.rest()
        self._weights.seal()
        self._start()
        self.progress = Progress(world.world_size)
        self._first_order: list[str] | None = []
        self._outstanding: Counter[str] = Counter()
        self._uncollected: set[str] = set()
        self._begun: set[str] = set()
        self._ignored_pass = -1
        self._walk = 0
        self._reduced_late = self._is_full = self._places_changed = False
        self._states: list[AbstractContextManager[None]] = []
        self._improvises = False
        self._handles: list[_Handle] = [*install(module, self.units, self), *watch_optimizers(self)]
        if strategy.recompute != "none":
            blocks = [module.get_submodule(name) for name in find_blocks(module, strategy.units)]
            self._handles += recompute(blocks, strategy.recompute, strategy.recompute_every)
        if strategy.low:
            self._handles.append(cast_inputs(module, getattr(torch, strategy.precision)))
        if self._weights.swapped:
            self._handles += open_for_states(module, self._enter_states, self._leave_states)

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
        """The 2-norm of all parameters' `grad` as they are now: a 0-dim tensor, the same on every rank.

        A collective call where gradients are sharded, and with a parameter server.

        Raises:
            EngineError: The gradients are not reduced yet.
        """
        self._require_reduced("the gradient norm")
        present = [p.grad for p in self._weights.parameters if p.grad is not None]
        squares = square_sum(present).to(self.world.device)
        if self._synchronizer is not None and (self.schedule.shards > 1 or self._served):
            squares = squares if self.world.rank == 0 or not self._served else torch.zeros_like(squares)
            self._executor.settle()
            vector = squares.reshape(1)
            self._synchronizer.sum(vector, "gradient norm")
            squares = vector[0] / (1 if self._served else self.schedule.replicas)
        return self._as_norm(squares)

    def reduced_norm(self) -> Tensor:
        """The 2-norm of the gradients that the last synchronised backward reduced, known to every rank since.

        What was done to `p.grad` afterwards is not in it; see `grad_norm`.
        """
        squares = self._counts.squares() if self.schedule.shards > 1 and not self._reduced_late else None
        return self.grad_norm() if squares is None else self._as_norm(squares / self.schedule.replicas)

    def _as_norm(self, squares: Tensor) -> Tensor:
        dtypes = [getattr(torch, flat.master) for flat in self.layout.flats if flat.trainable]
        return squares.sqrt().to(dtypes[0] if dtypes else torch.float32)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every parameter is whole, in its own shape and dtype; what is written to it is kept.

        A collective call where parameters are sharded: every rank enters, and writes the same.
        """
        return self._full()

    @contextmanager
    def _full(self) -> Iterator[None]:
        if self._is_full or not self._weights.swapped:
            yield
            return
        self._executor.settle()
        self._is_full = True
        try:
            with self._weights.full(self._synchronizer.gather if self._synchronizer else None):
                yield
        finally:
            self._is_full = False

    def _refuse_graph(self, records: bool) -> None:
        if records:
            raise EngineError(
                "a forward with gradients inside pl.full_parameters: its backward would not be reduced. Train outside "
                "of it; evaluate inside it under torch.no_grad()"
            )

    def _enter_states(self) -> None:
        self._states.append(self._full())
        self._states[-1].__enter__()

    def _leave_states(self) -> None:
        self._states.pop().__exit__(None, None, None)

    def _close_states(self) -> None:
        """Leaves what a `load_state_dict` that raised left open."""
        while self._states:
            self._leave_states()

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` belongs to the model."""
        return self._arranged.holds(identity)

    def drain_events(self) -> list[Event]:
        """The events of every op executed since the last call."""
        return self._executor.drain()

    def broadcast_buffers(self) -> None:
        """Gives every rank rank 0's buffers, such as the running statistics of BatchNorm. A collective call."""
        if self._synchronizer is not None:
            self._synchronizer.broadcast(self.module.buffers())

    def reset(self) -> None:
        """After an exception in forward or backward: drops the step's gradients and makes the engine usable.

        A collective call. Ranks may have failed in different places: collectives that some began and others did not
        end with their connections, and new ones are opened. Weights are what they were before the step.
        """
        self.progress.reset()
        self._outstanding.clear()
        self._uncollected.clear()
        self._close_states()
        for parameter in self._weights.parameters:
            parameter.grad = None
        self._weights.rest()
        self._weights.seal()
        if self._synchronizer is not None:
            self._synchronizer.reopen()
        self._counts.clear()
        self._start()
        # A gather after the last update may have been among what was given up.
        self._weights.updated()
        self._load_update_gathers()

    def close(self) -> None:
        """Ends the engine: hooks, threads and connections. The model is then a plain one on this rank."""
        for handle in self._handles:
            handle.remove()
        if self._weights.swapped:
            self._executor.settle()
            self._weights.leave(self._synchronizer.gather if self._synchronizer else None)
        if self._synchronizer is not None:
            self._synchronizer.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A deep copy of a parallel model is a plain model: it has no engine."""
        return (_no_engine, ())

    # ---- what the hooks tell (hooks.Listener)

    def model_begins(self, records: bool) -> None:
        """See `hooks.Listener`."""
        if self._is_full:
            self._refuse_graph(records)
            return
        if records and self._enter_forward():
            return
        if self.schedule.gathers_units and not in_backward():
            # Another walk over the units, which gathers them all.
            self._load_forward(0)
        elif not records:
            self._settle_update()

    def model_ends(self, records: bool) -> int:
        """See `hooks.Listener`."""
        if not in_backward():
            self._executor.end()
            self._executor.launch_left("gather")
        return self.progress.generation

    def forward_begins(self, unit: str, records: bool) -> None:
        """See `hooks.Listener`."""
        if self._is_full:
            self._refuse_graph(records)
            return
        if records:
            self._enter_forward()
            if self._first_order is not None and unit not in self._first_order:
                self._first_order.append(unit)
            self._executor.begin(Key("forward", unit, self.progress.micro_batch, "forward"))
        self._bring(unit)

    def in_forward(self) -> bool:
        """See `hooks.Listener`."""
        return self.progress.phase == "forward"

    def forward_ends(self, unit: str, records: bool, backward_follows: bool) -> int:
        """See `hooks.Listener`."""
        self._outstanding[unit] += backward_follows
        if not in_backward() and not self._is_full:
            self._executor.end()
            if unit in self.schedule.place:
                self._hold_accumulators((unit,))
                self._let_go(unit)
                self._executor.done(Key("forward", unit, self._walk, "forward"))
        return self.progress.generation

    def wants_backward(self, unit: str) -> bool:
        """See `hooks.Listener`: so for a unit whose first forward ran inside a reentrant checkpoint."""
        return unit in self._uncollected and unit not in self._begun and self._outstanding[unit] == 0

    def backward_nears(self, unit: str, generation: int) -> None:
        """See `hooks.Listener`."""
        if self._follows_backward(generation) or self.schedule.gathers_units:
            self._bring(unit)

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """See `hooks.Listener`."""
        follows = self._follows_backward(generation)
        if unit is not None and self.schedule.lets_go:
            if torch.is_grad_enabled():
                raise EngineError(
                    f"backward with create_graph=True: the graph of the gradients uses {unit}'s parameters when they "
                    "may have been let go again. Set strategy.zero to 2 or less, or strategy.accumulation to hold"
                )
            if not follows:
                # torch.autograd.grad computes with the parameters too.
                self._bring(unit)
        if follows and unit is not None:
            self._begun.add(unit)
            self._outstanding[unit] -= 1
            self._executor.end()
            self._collect(self._finished_by(unit))
            self._executor.begin(Key("backward", unit, self.progress.micro_batch, "backward"))
            self._bring(unit)

    def _follows_backward(self, generation: int) -> bool:
        """Whether the backward under way is this model's; begins it where it is new."""
        if self.progress.phase != "backward" and not self._is_backward():
            return False
        self.progress.require_current(generation)
        if self.progress.phase != "backward":
            self._enter_backward()
        return True

    # ---- what the optimizer's hooks tell

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer that holds this model's parameters is about to step."""
        self._require_reduced("optimizer.step()")
        if self._weights.swapped:
            self._executor.settle()
            self._weights.rest_in_pieces()
            if self.schedule.shards > 1:
                prepare_optimizer(optimizer, self._weights, self.strategy)
        self._executor.begin(Key("update", "optimizer", self.progress.last_micro_batch, "update"))

    def update_ends(self) -> None:
        """The optimizer has stepped. Where parameters are kept whole elsewhere, they are now sent."""
        if self._weights.swapped:
            self._weights.updated()
            self._weights.seal()
        self._executor.end()
        # Loaded only now: a closure may have run whole forward and backward passes inside the step.
        self._executor.load(self.progress.step, self.schedule.update(self.progress.last_micro_batch))
        self._executor.done(Key("update", "optimizer", self.progress.last_micro_batch, "update"))
        self.progress.end_update()
        if not self._weights.swapped:
            self._executor.complete()

    def _load_update_gathers(self) -> None:
        """Gathers whole parameters again, as after an update."""
        if self.schedule.gathers_after_update:
            update, *gathers = self.schedule.update(self.progress.last_micro_batch)
            self._executor.load(self.progress.step, gathers)
            self._executor.done(update.key)

    def _settle_update(self) -> None:
        """Waits for gathers that no scheduled op will wait for, and shows what they brought."""
        if self.schedule.gathers_after_update and not in_backward():
            self._executor.settle()
        if self._weights.swapped and not self.schedule.gathers_units:
            self._weights.show_whole(self.layout.units)

    # ---- one micro-batch

    def _enter_forward(self) -> bool:
        """A training forward goes on; returns whether it began a micro-batch."""
        if not self.progress.begin_forward():
            return False
        self._close_states()
        if self._weights.swapped and self.progress.micro_batch == 0:
            self._weights.require_sealed()
        self._load_forward(self.progress.micro_batch)
        return True

    def _load_forward(self, index: int) -> None:
        self._walk = index
        self._executor.load(self.progress.step, self.schedule.forward(index))
        if self.schedule.gathers_after_update:
            self._executor.require(self.schedule.sent_before[1])
        if self.schedule.gathers_units:
            self._bring_residents()
        elif self._weights.swapped:
            self._weights.show_whole(self.layout.units)
            self._hold_accumulators(self.layout.units)

    def _hold_accumulators(self, units: Collection[str]) -> None:
        if self._weights.dtype_changes:
            self._arranged.hold_accumulators(units)

    def _bring_residents(self) -> None:
        ops = [self.schedule.gather(bucket, 0, "forward") for bucket in self.schedule.residents]
        self._executor.require(op.key for op in ops)
        if not self._weights.holds_residents():
            for op in ops:
                self._executor.run(op)
        units = {unit: None for bucket in self.schedule.residents for unit in bucket.units}
        self._weights.show_whole(units)
        self._hold_accumulators(units)

    def _bring(self, unit: str) -> None:
        """Makes a unit's parameters whole, if they are not: waits for their gather, or gathers out of turn."""
        if not self._weights.swapped:
            return
        if not self.schedule.gathers_units:
            if not in_backward():
                self._weights.show_whole(self.layout.units)
            return
        if not self._weights.holds_residents():
            self._bring_residents()
        if unit not in self.schedule.place:
            return
        phase: Phase = "backward" if in_backward() else "forward"
        index = self.progress.micro_batch if phase == "backward" else self._walk
        self._executor.require(self._executor.after(Key(phase, unit, index, phase)))
        if not self._weights.holds(unit):
            # Not what the schedule foresaw, such as a second forward before backward.
            self._executor.drop("gather")
            self._executor.settle_stream("gather")
            for bucket in self.schedule.moving[unit]:
                self._executor.run(self.schedule.gather(bucket, index, phase))
        self._weights.show_whole((unit,))

    def _let_go(self, unit: str) -> None:
        """Lets a unit's parameters be pieces again, so that using them out of turn is an error and not stale."""
        if self.schedule.lets_go and unit in self.schedule.place:
            self._weights.let_go((unit,))

    def idle_micro_batch(self) -> None:
        """Takes part in the communication of a micro-batch that other ranks have and this one has not."""
        self._enter_forward()
        self._executor.launch_left("gather")
        self._begin_backward()
        self._leave_backward()

    def _enter_backward(self) -> None:
        self._begin_backward()
        # Queued from the outermost graph: from inside a reentrant checkpoint it would run when that one ends.
        Variable._execution_engine.queue_callback(self._leave_backward)

    def _begin_backward(self) -> None:
        self.progress.begin_backward()
        self._adopt_first_order()
        if self._places_changed and self.progress.micro_batch == 0:
            self._allocate_gradients()
            self._places_changed = False
        self._begun.clear()
        if self._gradients is not None:
            self._uncollected = set(self.schedule.collected)
            self._gradients.begin(self.progress.micro_batch, self.progress.synchronises)
            self._gradients.allocate_sums()
        backward = self.schedule.backward(self.progress.micro_batch, self.progress.synchronises)
        self._executor.load(self.progress.step, backward)
        if self._improvises:
            self._executor.drop("gather")

    def _finished_by(self, unit: str) -> list[str]:
        """Units whose backward is over when that of `unit` begins: all their gradients exist."""
        over = set(self._arranged.units_after(unit))
        if not self.schedule.rotates:
            over = {other for other in over if self._outstanding[other] <= 0}
        elif self.schedule.place:
            self._executor.done(*(Key("backward", u, self.progress.micro_batch, "backward") for u in over))
        return [other for other in self.schedule.collected if other in over & self._uncollected]

    def _collect(self, units: Sequence[str]) -> None:
        """Takes the gradients of `units` into their buckets, which launches the reductions that waited for them."""
        for unit in units:
            assert self._gradients is not None
            key = Key("collect", unit, self.progress.micro_batch, "backward")
            self._executor.begin(key)
            self._gradients.collect(self._arranged.slots_of(unit))
            self._executor.end()
            if unit not in self.schedule.late:
                self._let_go(unit)
            self._uncollected.discard(unit)
            self._executor.done(key)

    def _leave_backward(self) -> None:
        synchronises, gradients = self.progress.synchronises, self._gradients
        self._executor.end()
        # For units that this rank did not run and others may still have to, before it waits for their gradients.
        self._executor.launch_left("gather")
        self._collect([unit for unit in self.schedule.collected if unit in self._uncollected])
        late = gradients.late() if gradients and synchronises else []
        if gradients is not None:
            gradients.used.update(late)
            if self._synchronizer is None:
                gradients.collect(late)
                gradients.add_all_reduced()
        if gradients is not None and self._synchronizer is not None and synchronises:
            measure = Key("measure", COUNTS, self.progress.micro_batch, "backward")
            self._executor.begin(measure)
            squares = gradients.square_sum() if self.schedule.shards > 1 else None
            self._counts.fill(gradients.used, late, squares, gradients.carries)
            self._executor.end()
        if synchronises:
            self._executor.complete()
        else:
            self._executor.launch_all()
        if gradients is not None and synchronises:
            used: Collection[int] = gradients.used
            if self._synchronizer is not None:
                self._reduce_late(late, self._counts.late(late, first=self.progress.step == 0))
                used = used if gradients.complete else self._counts.used()
            self._weights.rest_in_pieces()
            gradients.publish(used, keep=self._keeps_gradients)
        elif gradients is not None:
            gradients.end_local()
        if self._improvises:
            self._weights.rest()
            self._weights.assign_places(self.schedule)
            self._improvises = False
        self._counts.close(synchronises, self.world.world_size)
        self._outstanding.clear()
        self.progress.end_backward()

    def _reduce_late(self, mine: Sequence[int], anyones: Sequence[int]) -> None:
        """Reduces what came after its unit was collected; from now on these units wait for the whole backward."""
        self._reduced_late = bool(anyones)
        if not anyones or self._synchronizer is None or self._gradients is None:
            return
        for bucket in self.schedule.reduced:
            if not set(anyones).isdisjoint(bucket.slots):
                op = self.schedule.reduce(bucket, self.progress.micro_batch)[0]
                spare = self._synchronizer.transports["reduce"].allocate(
                    bucket.numel, self._gradients.whole(bucket).dtype
                )
                self._executor.run(op, self._synchronizer.late_work(op, self._weights, self._gradients, mine, spare))
        self._arranged.mark_late(anyones)
        self._places_changed = self.schedule.rotates

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
    def _weights(self) -> Weights:
        return self._arranged.weights

    def _arrange(self, order: tuple[str, ...]) -> Arrangement:
        # What is sent every step lies where a transport reaches it.
        allocate = alone_on(self.world.device)
        if self._synchronizer is not None:
            name = "gather" if "gather" in self._synchronizer.transports else "reduce"
            if name == "gather" or self._served:
                allocate = self._synchronizer.transports[name].allocate
        return Arrangement(
            self.module, self._specs, self.units, order, self.strategy, self.world, self._counts.numel, allocate
        )

    def _adopt_first_order(self) -> None:
        """The first forward shows in which order units really run: the same for all ranks, rank 0's."""
        if self._first_order is None:
            return
        order = tuple(agree_on_order(self._first_order, self.world))
        self._first_order = None
        if order != self.schedule.order:
            if self._weights.swapped:
                # Pieces stay where they are, for an optimizer may have made its states for them.
                self._arranged.reorder(order)
                self._improvises = self.schedule.gathers_units
            else:
                self._arranged = self._arrange(order)
        self._allocate_gradients()

    def _allocate_gradients(self) -> None:
        if self.schedule.collects:
            transports = self._synchronizer.transports if self._synchronizer else {}
            alone = alone_on(self.world.device)
            allocate = transports["reduce"].allocate if transports else alone
            sums = transports["replicate"].allocate if "replicate" in transports else alone
            self._gradients = Gradients(self.schedule, self._weights, allocate, sums)

    def _start(self) -> None:
        """Starts executing, with nothing under way."""
        streams = self._synchronizer.streams if self._synchronizer else {}
        self._executor = Executor(self.world.rank, open_clock(self.world), streams, self._work)

    def _work(self, op: Op) -> Callable[[], Traffic]:
        assert self._synchronizer is not None
        return self._synchronizer.work(op, self._weights, self._gradients, self._counts)

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
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self._weights.parameters, strict=True)):
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
