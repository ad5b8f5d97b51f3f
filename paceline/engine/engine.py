"""The engine: follows one model through forward, backward and update, as its schedule says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.devices import strategy_on
from paceline.comm.patience import require_unbroken
from paceline.comm.world import World
from paceline.core.events import Event
from paceline.core.layout import Layout
from paceline.core.schedule import Schedule
from paceline.core.step_state import StepState
from paceline.core.strategy import Strategy
from paceline.engine.backward import BackwardPass
from paceline.engine.forward import ForwardPass
from paceline.engine.give_up import gives_up
from paceline.engine.gradient_norm import GradientNorm
from paceline.engine.outside_use import OutsideUse
from paceline.engine.program import Program
from paceline.engine.unit_outputs import Own, UnitOutputs
from paceline.engine.update import Update
from paceline.executor.chunk_products import ChunkProducts, chunk_products, is_small_enough
from paceline.executor.gather_shards import GatherShards
from paceline.executor.gradient_norms import GradientNorms
from paceline.hooks.low_precision import compute_low
from paceline.hooks.modules import install, open_for_states, refuse_other_parameters, require_hooks
from paceline.hooks.other_models import OtherModels
from paceline.hooks.parameters import watch_parameters
from paceline.hooks.wrappers import refuse_ddp_around, require_unwrapped
from paceline.materialise.materialiser import Init, materialiser
from paceline.materialise.own_memory import require_own_parameters
from paceline.materialise.to_device import move
from paceline.models.recompute import recompute
from paceline.models.units import find_blocks, find_units
from paceline.optimizers.watch import alive, watch_optimizers


class Engine:
    """Executes the schedule of one model on one rank.

    Attributes:
        module: The user's model.
        strategy: How it is synchronised.
        world: The job.
        units: Unit modules by name.
        state: Which step and micro-batch the training loop is in, and what it may do there.
        program: The schedule, and the tensors, ranks and executor that it runs with.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy,
        world: World,
        init: Init | None = None,
        weights: str | Path | None = None,
    ) -> None:
        """Lays out the model, sends rank 0's weights and buffers to all, and registers hooks.

        Args:
            module: The model.
            strategy: How it is synchronised.
            world: The job.
            init: See `parallelize`.
            weights: See `parallelize`.

        Raises:
            UserError: Ranks built different models, or it cannot be made with `init` and `weights`.
        """
        strategy = strategy_on(strategy, world.device)
        require_hooks(module)
        require_unwrapped(module)
        is_sharded = strategy.gathers and strategy.shards(world.world_size) > 1
        engines = [each for each in alive() if isinstance(each, Engine)]
        left = OtherModels(module, engines, strategy, is_sharded)
        require_own_parameters(module, None if strategy.moves_parameters else world.device, is_sharded, left)
        self.module, self.strategy, self.world = module, strategy, world
        self.units = left.leave(find_units(module, strategy.units))
        made_by = materialiser(module, self.units.values(), world, init, weights)
        if made_by is None:
            move(module, world.device)
        self.state = StepState()
        self.program = program = Program(module, self.units, strategy, world, self, left, made_by)
        self.forward = ForwardPass(self.program, self.state)
        self.backward = BackwardPass(self.program, self.state, self.forward)
        self.update = Update(self.program, self.state, self.forward)
        self.norm = GradientNorm(self.program, self.state, self.update, self.settle)
        self._gather_shards = GatherShards(program.collectives, self.schedule, world.device, self.state, self.settle)
        program.parameters.flat.gather_shards = ref(self._gather_shards)
        self.backward.when_over, self.forward.end_raised_update = self.update.resume, self.update.end_raised
        self._outside = OutsideUse(self.program, self.forward)
        self._outputs = UnitOutputs(self.program, self.units, self.forward)
        self._handles: list[Any] = [*install(module, self.units, self, self.forward.under_way), *program.tables.handles]
        self._handles += [*refuse_other_parameters(module), self._outputs.hooked, self.backward.autograd]
        if self.schedule.copies_gradients:
            trained = [p for p in program.parameters.all if p.requires_grad]
            self._handles += watch_parameters(trained, self.backward, self.schedule.replaces_earlier_gradients)
        watch_optimizers(self)
        if strategy.recompute != "none":
            blocks = left.leave({name: module.get_submodule(name) for name in find_blocks(module, strategy.units)})
            self._handles += recompute([*blocks.values()], strategy.recompute, strategy.recompute_every)
        if strategy.low:
            low, applies = getattr(torch, strategy.precision), lambda: not self.forward.whole.is_full
            self._handles += compute_low(module, self.units.values(), low, applies)
        for whole in (*self.forward.whole.others, self.forward.whole):
            self._handles += open_for_states(module, whole.open_states, whole.close_state)

    @property
    def layout(self) -> Layout:
        """Where parameters and gradients sit."""
        return self.program.layout

    @property
    def schedule(self) -> Schedule:
        """The ops of a step, read to decide what is launched when."""
        return self.program.schedule

    # ---- what the training loop calls

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients; the next one outside completes the step's."""
        return self.state.deferring()

    def count(self, *values: float | Tensor) -> None:
        """Adds numbers to be summed over micro-batches and ranks, called before `backward`; see `counts`."""
        self.program.statistics.add(values)

    def counts(self) -> Tensor:
        """The sums of what `count` was given up to the last synchronised backward, over all ranks.

        Returns:
            fp64, one element per value of `count`, on the model's device.
        """
        return self.program.statistics.result()

    def grad_norm(self) -> Tensor:
        """See `GradientNorm.now`."""
        return self.norm.now()

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every parameter is whole, in its own shape and dtype; what is written to it is kept.

        A collective call where parameters are sharded: every rank enters, and writes the same.
        """
        return self.forward.whole.full("pl.full_parameters")

    def settle(self) -> None:
        """Waits for collectives under way, such as those that send what was updated behind the next forward."""
        self.forward.wait_for_updates()

    def record_events(self, on: bool = True) -> None:
        """Whether ops are recorded from now on, to be read with `drain_events`.

        On CPUs they are from the start. On a GPU each takes some microseconds of the host, so it is asked for there.
        """
        self.program.recorder.record(on)

    def drain_events(self) -> list[Event]:
        """The events of every op executed since the last call, while they were recorded: see `record_events`."""
        return self.program.recorder.drain()

    def record_gradient_norms(self, on: bool = True) -> None:
        """Whether norms of each parameter's gradients are taken from the next step on; see `gradient_norms`."""
        self.program.norms.record(on and self.world.world_size > 1, is_small_enough(self.schedule))

    def gradient_norms(self) -> GradientNorms | None:
        """Norms of the latest step; None if none were taken. On a GPU the host waits for that step."""
        return self.program.norms.read()

    def chunk_products(self) -> list[ChunkProducts]:
        """Products of the latest step, once, on rank 0; none without norms, or of too much. A collective call."""
        return chunk_products(self.schedule, self.program.norms.take())

    def remove_hooks(self) -> None:
        """Takes its hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A copy of a parallel model is a plain model: it has no engine."""
        return (type(None), ())

    # ---- what the hooks tell (Listener)

    @gives_up
    def root_pre_forward(self, records: bool) -> None:
        """See `Listener`."""
        if records and self.schedule.shards > 1:
            refuse_ddp_around(self.module)
        if self.update.under_way:
            self.update.suspend()
        self.forward.root_pre_forward(records)

    def root_post_forward(self, records: bool) -> int:
        """See `Listener`."""
        self.forward.root_post_forward()
        return self.state.generation

    @gives_up
    def pre_forward(self, unit: str, records: bool) -> None:
        """See `Listener`."""
        require_unbroken()
        if self.update.under_way:
            self.update.suspend()
        self.forward.pre_forward(unit, records)
        self._outputs.begin(unit)

    def in_forward(self) -> bool:
        """See `Listener`."""
        return self.state.phase == "forward"

    @gives_up
    def post_forward(self, unit: str, records: bool, backward_follows: bool) -> int:
        """See `Listener`."""
        if backward_follows:
            self.backward.post_forward(unit)
        self.forward.post_forward(unit)
        return self.state.generation

    @gives_up
    def own_outputs(self, unit: str, output: Any, filled: Iterable[Tensor], backward_follows: bool) -> Own:
        """See `Listener`."""
        return self._outputs.own(unit, output, filled, backward_follows)

    def wants_backward(self, unit: str) -> bool:
        """See `Listener`."""
        return self.backward.wants(unit)

    @gives_up
    def first_output_gradient(self, unit: str, generation: int) -> None:
        """See `Listener`."""
        self.backward.first_output_gradient(unit, generation)

    @gives_up
    def pre_backward(self, unit: str | None, generation: int) -> None:
        """See `Listener`."""
        require_unbroken()
        self.backward.pre_backward(unit, generation)

    # ---- what a sharded parameter asks (Owner)

    def parameter_used(self, index: int, function: str, edits: bool, shape: Sequence[int] | None = None) -> None:
        """See `Owner`."""
        self._outside.parameter_used(index, function, edits, shape)

    def dtype_seen(self, index: int, computed: torch.dtype) -> torch.dtype:
        """See `Owner`."""
        return self._outside.dtype_seen(index, computed)

    # ---- what the optimizer's hooks tell (Watcher)

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` belongs to the model."""
        return self.program.structure.holds(identity)

    def owns_parameter(self, identity: int) -> bool:
        """Whether it is trained or sharded here."""
        return self.program.structure.holds(identity, in_bucket=True)

    @gives_up
    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer that holds this model's parameters is about to step."""
        self.update.begin(optimizer)

    @gives_up
    def part_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step inside another's step."""
        self.update.part_begins(optimizer)

    @gives_up
    def update_ends(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped. Where parameters are kept whole elsewhere, they are now sent."""
        self.update.end(optimizer)
        self.backward.order.updated()

    @gives_up
    def closure_begins(self, optimizer: Optimizer) -> None:
        """The closure of the optimizer's step is about to run."""
        self.update.closure_begins(optimizer)

    @gives_up
    def closure_ends(self, optimizer: Optimizer) -> None:
        """A closure has run, and with it the backward whose gradients the step is to use."""
        self.update.closure_ends(optimizer)

    def mean_loss(self, loss: float | Tensor) -> Tensor:
        """The mean over ranks of what an optimizer's closure returned. A collective call."""
        return self.update.mean_loss(loss)
