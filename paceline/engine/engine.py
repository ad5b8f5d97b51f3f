"""The engine: follows one model through forward, backward and update, as its schedule says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.world import World
from paceline.engine.backward import BackwardPass
from paceline.engine.forward import ForwardPass
from paceline.engine.freed import return_freed_memory
from paceline.engine.gradients import square_sum
from paceline.engine.hooks import cast_inputs, install, open_for_states
from paceline.engine.optimizers import leave_optimizers, prepare_optimizer, watch_optimizers
from paceline.engine.progress import Progress
from paceline.engine.recompute import recompute
from paceline.engine.running import Running
from paceline.engine.units import find_blocks, find_units
from paceline.errors import UserError
from paceline.events import Event
from paceline.layout import Layout
from paceline.ops import READ, Key
from paceline.schedule import Schedule
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
        running: Layout, weights, gradients and what executes the schedule.
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
        self.running = Running(module, self.units, strategy, world)
        self._forward = ForwardPass(self.running)
        self._backward = BackwardPass(self.running, self._forward)
        self._handles: list[_Handle] = [*install(module, self.units, self)]
        watch_optimizers(self)
        if strategy.recompute != "none":
            blocks = [module.get_submodule(name) for name in find_blocks(module, strategy.units)]
            self._handles += recompute(blocks, strategy.recompute, strategy.recompute_every)
        if strategy.low:
            low = getattr(torch, strategy.precision)
            self._handles.append(cast_inputs(module, low, lambda: not self._forward.is_full))
        if self.running.weights.swapped:
            self._handles += open_for_states(module, self._forward.open_states, self._forward.close_state)

    @property
    def progress(self) -> Progress:
        """Which step and micro-batch the training loop is in."""
        return self.running.progress

    @property
    def layout(self) -> Layout:
        """Where parameters and gradients sit."""
        return self.running.layout

    @property
    def schedule(self) -> Schedule:
        """The ops of a step, read to decide what is launched when."""
        return self.running.schedule

    # ---- what the training loop calls

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients; the next one outside completes the step's."""
        return self.progress.deferring()

    def idle_micro_batch(self) -> None:
        """Takes part in the communication of a micro-batch that other ranks have and this one has not."""
        self._backward.idle()

    def count(self, *values: float | Tensor) -> None:
        """Adds numbers to be summed over micro-batches and ranks, called before `backward`; see `counts`."""
        self.running.counts.add(values)

    def counts(self) -> Tensor:
        """The sums of what `count` was given up to the last synchronised backward, over all ranks.

        Returns:
            fp64, one element per value of `count`, on the model's device.
        """
        return self.running.counts.result()

    def look_at_gradients(self) -> None:
        """From now on each rank looks whether its own gradients are finite before they are summed; see `culprits`.

        It costs a pass over the gradients, so it is for finding out whose a norm that is not finite comes from.
        """
        self.running.counts.looks = True

    def culprits(self) -> Tensor:
        """How many ranks' own gradients were not finite in the last synchronised backward, and the sum of these ranks.

        Returns:
            fp64, (2,), on the model's device, the same on every rank; the first is negative where no rank looked.
        """
        return self.running.counts.culprits()

    def grad_norm(self) -> Tensor:
        """The 2-norm of all parameters' `grad` as they are now: a 0-dim tensor, the same on every rank.

        A collective call where gradients are sharded, and with a parameter server.

        Raises:
            EngineError: The gradients are not reduced yet.
        """
        running = self.running
        running.require_reduced("the gradient norm")
        present = [p.grad for p in running.weights.parameters if p.grad is not None]
        squares = square_sum(present).to(self.world.device)
        if running.synchronizer is not None and (self.schedule.shards > 1 or running.served):
            squares = squares if self.world.rank == 0 or not running.served else torch.zeros_like(squares)
            running.executor.settle()
            vector = squares.reshape(1)
            running.synchronizer.sum(vector, "gradient norm")
            squares = vector[0] / (1 if running.served else self.schedule.replicas)
        return self._as_norm(squares)

    def reduced_norm(self) -> Tensor:
        """The 2-norm of the gradients that the last synchronised backward reduced, known to every rank since.

        What was done to `p.grad` afterwards is not in it; see `grad_norm`.
        """
        known = self.schedule.shards > 1 and not self._backward.reduced_late
        squares = self.running.counts.squares() if known else None
        return self.grad_norm() if squares is None else self._as_norm(squares / self.schedule.replicas)

    def _as_norm(self, squares: Tensor) -> Tensor:
        dtype = torch.float32
        for flat in self.layout.flats:
            dtype = torch.promote_types(dtype, getattr(torch, flat.master)) if flat.trainable else dtype
        return squares.sqrt().to(dtype)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every parameter is whole, in its own shape and dtype; what is written to it is kept.

        A collective call where parameters are sharded: every rank enters, and writes the same.
        """
        return self._forward.full()

    def settle(self) -> None:
        """Waits for collectives under way, such as those that send what was updated behind the next forward."""
        self.running.executor.settle()

    def drain_events(self) -> list[Event]:
        """The events of every op executed since the last call."""
        return self.running.executor.drain()

    def broadcast_buffers(self) -> None:
        """Gives every rank rank 0's buffers, such as the running statistics of BatchNorm. A collective call."""
        if self.running.synchronizer is not None:
            self.running.synchronizer.broadcast(self.module.buffers())

    def reset(self) -> None:
        """After an exception in forward or backward: drops the step's gradients and makes the engine usable.

        A collective call. Ranks may have failed in different places: collectives that some began and others did not
        end with their connections, and new ones are opened. Weights are what they were before the step.
        """
        running = self.running
        running.progress.reset()
        self._backward.reset()
        self._forward.close_states()
        for parameter in running.weights.parameters:
            parameter.grad = None
        running.weights.rest()
        running.weights.seal()
        if running.synchronizer is not None:
            running.synchronizer.reopen()
        running.counts.clear()
        running.start()
        # A gather after the last update may have been among what was given up.
        running.weights.updated()
        self._forward.gather_update()

    def close(self) -> None:
        """Ends the engine: hooks, threads and connections. The model is then a plain one on this rank."""
        leave_optimizers(self)
        for handle in self._handles:
            handle.remove()
        synchronizer = self.running.synchronizer
        if self.running.weights.swapped:
            self.running.executor.settle()
            self.running.weights.leave(synchronizer.gather if synchronizer else None)
        if synchronizer is not None:
            synchronizer.close()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """A deep copy of a parallel model is a plain model: it has no engine."""
        return (_no_engine, ())

    # ---- what the hooks tell (hooks.Listener)

    def model_begins(self, records: bool) -> None:
        """See `hooks.Listener`."""
        self._forward.model_begins(records)

    def model_ends(self, records: bool) -> int:
        """See `hooks.Listener`."""
        self._forward.model_ends()
        return self.progress.generation

    def forward_begins(self, unit: str, records: bool) -> None:
        """See `hooks.Listener`."""
        self._forward.unit_begins(unit, records)

    def in_forward(self) -> bool:
        """See `hooks.Listener`."""
        return self.progress.phase == "forward"

    def forward_ends(self, unit: str, records: bool, backward_follows: bool) -> int:
        """See `hooks.Listener`."""
        if backward_follows:
            self._backward.forward_ended(unit)
        self._forward.unit_ends(unit)
        return self.progress.generation

    def wants_backward(self, unit: str) -> bool:
        """See `hooks.Listener`."""
        return self._backward.wants(unit)

    def backward_nears(self, unit: str, generation: int) -> None:
        """See `hooks.Listener`."""
        self._backward.unit_nears(unit, generation)

    def backward_begins(self, unit: str | None, generation: int) -> None:
        """See `hooks.Listener`."""
        self._backward.unit_begins(unit, generation)

    # ---- what the optimizer's hooks tell (optimizers.Watcher)

    def holds_parameter(self, identity: int) -> bool:
        """Whether the parameter with this `id()` belongs to the model."""
        return self.running.arranged.holds(identity)

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer that holds this model's parameters is about to step."""
        running = self.running
        running.require_reduced("optimizer.step()")
        if running.weights.swapped:
            running.executor.settle()
            running.weights.require_sealed()
            running.weights.rest_in_pieces()
            if self.schedule.shards > 1:
                prepare_optimizer(optimizer, running.weights, self.strategy)
        if self.schedule.shares and running.synchronizer is not None:
            # This rank has done with the parameters of this step; others may still read what it is about to write.
            running.executor.run(self.schedule.update(self.progress.last_micro_batch)[0])
        running.executor.begin(Key("update", "optimizer", self.progress.last_micro_batch, "update"))

    def update_ends(self) -> None:
        """The optimizer has stepped. Where parameters are kept whole elsewhere, they are now sent."""
        running = self.running
        if running.weights.swapped:
            running.weights.updated()
            running.weights.seal()
        running.executor.end()
        # Loaded only now: a closure may have run whole forward and backward passes inside the step.
        ops = self.schedule.update(self.progress.last_micro_batch)
        running.executor.load(self.progress.step, [op for op in ops if op.target != READ])
        running.executor.done(Key("update", "optimizer", self.progress.last_micro_batch, "update"))
        self.progress.end_update()
        if self.progress.generation == 1 and self.world.device.type == "cpu":
            # Now optimizer's states are there, too, and nothing as large is allocated again.
            return_freed_memory()
        if not running.weights.swapped:
            running.executor.complete()

    def mean_loss(self, loss: float | Tensor) -> Tensor:
        """The mean over ranks of what an optimizer's closure returned. A collective call."""
        mean = torch.as_tensor(loss, dtype=torch.float64, device=self.world.device).detach().reshape(1).clone()
        if self.running.synchronizer is not None:
            self.running.executor.settle()
            self.running.synchronizer.sum(mean, "the loss that an optimizer's closure returned")
        return mean[0] / self.world.world_size


def _no_engine() -> None:
    return None
