"""An optimizer's step on parameters that ranks share out: they become shards before it, and are sent after it."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.buffers.earlier_gradients import require_own_gradients
from paceline.comm.agreement import differing
from paceline.core.errors import EngineError, UserError
from paceline.core.ops import GRADIENTS, OPTIMIZER, READ, Key, Op
from paceline.core.step_state import StepState
from paceline.engine.forward import ForwardPass
from paceline.engine.program import Program
from paceline.hooks.modules import in_backward
from paceline.materialise.freed import return_freed_memory
from paceline.optimizers.shard_states import mark_states, prepare_optimizer, require_states_of
from paceline.optimizers.shown import Shown
from paceline.optimizers.watch import begins_with_closure, is_stepping
from paceline.tensors.gradient_shard import GradientShard


class Update:
    """Follows the steps of optimizers that hold a model's parameters.

    Attributes:
        under_way: Whether an optimizer is stepping, and its parameters are shards.
    """

    def __init__(self, program: Program, state: StepState, forward: ForwardPass) -> None:
        """Follows nothing yet."""
        self._program, self._state, self._forward = program, state, forward
        parameters, full = program.parameters, partial(forward.whole.full, "optimizer.step()")
        self._shown = Shown(parameters.flat, parameters.show_local, full)
        self.under_way = self._is_suspended = self._has_updated = False
        self._closures = self._thread = 0
        self._stepping: ref[Optimizer] | None = None

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: it is shown this rank's shards.

        Raises:
            EngineError: Gradients are partial, this rank's own or of a backward that went unseen, or parameters whole.
            UserError: The optimizer cannot step on shards.
        """
        program, parameters, executor = self._program, self._program.parameters, self._program.executor
        self.abandon()
        if self._forward.whole.is_full:
            raise EngineError(
                "optimizer.step() inside pl.full_parameters, where parameters are whole while an optimizer updates "
                "this rank's shards of them: step before it or after it"
            )
        program.others.require_parallel()
        self.require_reduced("optimizer.step()")
        self._forward.idle_ranks.meet()
        if program.gradients is not None:
            program.gradients.require_unedited()
        if parameters.flat.managed:
            self._forward.wait_for_updates()
            parameters.require_unedited()
            prepare_optimizer(optimizer, parameters.flat, program.strategy)
            require_own_gradients(parameters.flat)
        else:
            require_states_of(optimizer, parameters.flat.index_of.__contains__)
        self._thread, self._stepping = get_ident(), ref(optimizer)
        self._show(optimizer)
        executor.load(executor.step, self._ops())
        # Where ranks share memory this one has done with it now, but others may still read what it is about to write.
        executor.begin(self._key("update"))

    def _show(self, optimizer: Optimizer) -> None:
        self._is_suspended, self.under_way = False, True
        self._shown.show(optimizer)
        ranks, index = self._program.world.world_size, self._state.last_micro_batch
        add_up = partial(self._program.sum, what="rows of tables", micro_batch=index, phase="update")
        self._program.tables.show(optimizer, self._program.structure.holds, add_up, ranks)

    def _ops(self) -> tuple[Op, ...]:
        schedule, index = self._program.schedule, self._state.last_micro_batch
        # Gradients that nothing moves are autograd's own, and no op hands them over.
        published = self._program.executor.knows(Key("publish", GRADIENTS, index, "backward"))
        return schedule.update(index) if published or not schedule.copies_gradients else schedule.lone_update(index)

    def part_begins(self, optimizer: Optimizer) -> None:
        """Another optimizer is about to step inside the step, and finds what that one is shown.

        Raises:
            UserError: It holds states of shards, but parameters are whole.
        """
        if self.under_way and self._shown.is_whole:
            try:
                require_states_of(optimizer, self._program.parameters.flat.index_of.__contains__)
            except UserError as error:
                raise UserError(
                    f"{error}. It has stepped outside of the one that wraps it: let that one step from the first step "
                    "on, and call its zero_grad() before, in which torch finds the steps of one that never called "
                    "Optimizer.__init__"
                ) from None

    def suspend(self) -> None:
        """A closure runs, or a forward inside the step: parameters are what they are outside of it."""
        self.end_raised()
        if self.under_way:
            self._take_back()
            self._is_suspended = True

    def _take_back(self, takes_given: bool = True) -> None:
        self._program.tables.take_back()
        self._shown.take_back(takes_given)
        if self._program.parameters.flat.managed:
            self._program.parameters.rest()
        self.under_way = False

    def resume(self) -> None:
        """A backward inside the step, but in no closure, is over: the step goes on, if it was the step's last."""
        self.end_raised()
        optimizer = self._stepping() if self._stepping else None
        if optimizer and self._is_suspended and not self._closures and self._state.gradients == "reduced":
            self._show(optimizer)

    def closure_begins(self, optimizer: Optimizer) -> None:
        """The step's closure begins: all of it finds gradients and parameters as outside of the step."""
        if self.under_way and self._program.parameters.flat.managed and not begins_with_closure(optimizer):
            # Such as one that looks ahead: what it has done to shards so far is an update, and what is left another.
            self.end(optimizer)
        elif self.under_way:
            self.suspend()
        self._closures += 1

    def closure_ends(self, optimizer: Optimizer) -> None:
        """The step's closure has ended: the step goes on.

        Raises:
            EngineError: It has left gradients that are partial.
        """
        self._closures -= 1
        if self._closures:
            return
        if self._is_suspended:
            self.require_reduced("optimizer.step() with a closure")
            require_own_gradients(self._program.parameters.flat)
            # Forwards of the closure have launched what was left to launch, and may have read what is to be written.
            self._show(optimizer)
            self._program.executor.load(self._program.executor.step, self._ops())
            self._program.executor.begin(self._key("update"))
        elif not self.under_way:
            self.begin(optimizer)

    def abandon(self) -> None:
        """Ends a step that raised, if there is one: what it wrote in place stays, and nothing else is taken over."""
        if self.under_way:
            self._take_back(takes_given=False)
            if (parameters := self._program.parameters).flat.has_masters:
                # What is computed with follows what the step has written.
                parameters.updated()
                parameters.rest()
        self._is_suspended, self._closures = False, 0

    def end_raised(self) -> None:
        """Ends a step that raised, if there is one, as others end: what it wrote is sent. Its thread steps no more."""
        if (self.under_way or self._is_suspended) and get_ident() == self._thread and not is_stepping():
            if self.under_way and self._stepping and (optimizer := self._stepping()):
                self.end(optimizer)
            self.abandon()

    def end(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped: what it updated is rounded, and sent to ranks that keep it whole."""
        program, parameters, executor = self._program, self._program.parameters, self._program.executor
        if self._is_suspended:
            self.require_reduced("optimizer.step() with a forward and backward inside")
        if self.under_way:
            self._program.tables.take_back()
            self._shown.take_back()
        self._program.tables.used(optimizer)
        mark_states(optimizer, parameters.flat)
        self.under_way = self._is_suspended = False
        executor.end()
        ops = self._ops()
        if not executor.knows(self._key("update")):
            # A closure has run whole forward and backward passes inside the step.
            executor.load(executor.step, program.schedule.update_around_passes(self._state.last_micro_batch))
        executor.done(self._key("update"))
        if parameters.flat.managed:
            casts = executor.knows(self._key("cast"))
            if casts:
                executor.begin(self._key("cast"))
            parameters.updated()
            executor.end()
            if casts:
                executor.done(self._key("cast"))
        parameters.waiting.update(op.target for op in ops if op.target not in (READ, OPTIMIZER))
        self._state.end_update()
        if not self._has_updated and self._program.world.device.type == "cpu":
            # Now optimizer's states are there, too, and nothing as large is allocated again.
            return_freed_memory()
        self._has_updated = True
        if parameters.flat.managed:
            parameters.rest()
            if parameters.flat.has_aliases:
                # Such as a list of `p.data` that the loop has kept: what is read there must have arrived.
                self._forward.wait_for_updates()
                parameters.flat.former.follow(parameters.flat.views)
        else:
            executor.complete()
            parameters.waiting.clear()
        # Forwards between backward and update may have changed them once more.
        program.send_buffers(self._state.last_micro_batch, "update")

    def _key(self, kind: str) -> Key:
        return Key(kind, OPTIMIZER, self._state.last_micro_batch, "update")

    def mean_loss(self, loss: float | Tensor) -> Tensor:
        """The mean over ranks of what an optimizer's closure returned. A collective call."""
        mean = torch.as_tensor(loss, dtype=torch.float64, device=self._program.world.device).detach().reshape(1).clone()
        if (ranks := self._program.world.world_size) > 1:
            self._forward.wait_for_updates()
            self._program.sum(mean, "a closure's loss", self._state.last_micro_batch, "update")
        return mean[0] / ranks

    def require_reduced(self, what: str) -> None:
        """Refuses to use gradients that are partial, this rank's own, or of a backward that the hooks did not see.

        Raises:
            EngineError: They are.
        """
        program, state = self._program, self._state
        if state.phase == "backward" and in_backward():
            raise EngineError(
                f"{what} inside backward, as in a hook on gradients: other gradients are still to come, and none is "
                "reduced yet. Call it after loss.backward() has returned"
            )
        state.require_whole_backward(what)
        if program.world.world_size == 1 or (state.gradients == "reduced" and not state.is_used):
            return
        if not (made := self._made_by_hand()):
            return
        # All ranks may have been given the same: by all-reducing it in the loop.
        left = "a backward under no_sync" if state.gradients == "local" else "no backward of the model"
        if other := differing(made, f"{what}: gradients that {left} left"):
            state.require_reduced(what)
            raise EngineError(
                f"{what}: {program.layout.slots[other[0]].spec.name} has a gradient of a backward that paceline did "
                "not see, or put into p.grad by hand, and it is this rank's own. Compute the loss from what model(...) "
                "returns and call backward on it, with inputs=[...] for some parameters alone, or put the same "
                "gradient there on every rank; units that only run inside a reentrant checkpoint around the whole "
                "model are not seen either"
            )

    def _made_by_hand(self) -> dict[int, Tensor]:
        """The gradients that no backward of this model has left and no update has used, by index."""
        gradients, what = self._program.gradients, self._state.gradients
        published = gradients.published if gradients is not None and what == "reduced" else {}
        with torch._C.DisableTorchFunctionSubclass():
            return {
                index: parameter.grad
                for index, parameter in enumerate(self._program.parameters.all)
                # Of one without elements, which no bucket has, it is autograd's own.
                if parameter.grad is not None
                and parameter.grad.numel()
                # A shard is of what was reduced, if by another model: the step looks at whose it is.
                and not (what != "local" and isinstance(parameter.grad, GradientShard))
                and published.get(index) != parameter.grad.data_ptr()
            }
