"""One backward pass: gradients are copied in unit by unit, which launches their reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from torch import nn

from paceline.buffers.weights_hash import weights_hash
from paceline.core.layout import ROOT
from paceline.core.ops import GRADIENTS, STATISTICS, Key
from paceline.core.step_state import StepState
from paceline.engine.autograd_pass import AutogradPass
from paceline.engine.forward import ForwardPass
from paceline.engine.give_up import gives_up
from paceline.engine.gradients import Gradients
from paceline.engine.program import Program
from paceline.engine.unit_order import UnitOrder
from paceline.hooks.modules import in_backward, packs_saved_tensors
from paceline.hooks.parameters import is_complete
from paceline.hooks.refused_passes import refuse_graph_of_gradients


class BackwardPass:
    """Follows backward passes.

    A gradient is complete when autograd has added it to `p.grad`; which units' gradients could be complete, the
    backward of the unit before them tells.

    Attributes:
        program: The model's.
        state: Which step and micro-batch the training loop is in.
        order: In which units run.
        when_over: Is called at the end of each.
        fired, meet_gradient: See `hooks.parameters.Follower`.
        has_streams: Whether autograd adds to gradients on streams that need not be followed yet.
    """

    def __init__(self, program: Program, state: StepState, forward: ForwardPass) -> None:
        """Takes the forward order from `forward`, which also unshards parameters."""
        self.program, self.state, self._forward = program, state, forward
        self.order = UnitOrder(program, forward)
        self.has_streams = program.world.backend != "gloo"
        self._outstanding, self._uncopied = Counter[str](), list[str]()
        self._over, self._begun, self._over_from = set[str](), set[str](), 0
        self.fired, self._incomplete = set[int](), set[int]()
        self.when_over: Callable[[], None] = lambda: None
        self.autograd = AutogradPass(program, self.order, self._end)

    # ---- what the hooks tell

    def post_forward(self, unit: str) -> None:
        """A unit has run forward, and its backward is to follow."""
        self._outstanding[unit] += 1

    def wants(self, unit: str) -> bool:
        """Whether the backward of a forward is to be followed: of those inside backward too, of inner units none."""
        if unit in self._forward.under_way.inner:
            return False
        if not in_backward() or self.state.phase != "backward":
            # Or nothing has told of this pass yet: the checkpoint is around the whole model.
            return True
        if self.program.schedule.reshards_after_forward and not packs_saved_tensors():
            # It has a backward of its own, and the unit may be resharded until then.
            return True
        return unit in self._uncopied and unit not in self._begun and self._outstanding[unit] == 0

    def first_output_gradient(self, unit: str, generation: int) -> None:
        """The first gradient of a unit with several outputs is there."""
        if self._follows(unit, generation) or self.program.schedule.shards_parameters:
            self._forward.unshard(unit)

    def pre_backward(self, unit: str | None, generation: int) -> None:
        """The backward of a unit begins, or (None) that of the whole model."""
        follows = self._follows(unit, generation)
        if unit is None:
            if follows and not self.program.schedule.order:
                self._begin_unit(ROOT)
            return
        schedule, executor = self.program.schedule, self.program.executor
        if schedule.reshards_after_forward:
            refuse_graph_of_gradients(unit)
            if not follows:
                # torch.autograd.grad computes with the parameters too.
                self._forward.unshard(unit)
        if follows:
            self._begun.add(unit)
            self._outstanding[unit] -= 1
            executor.end()
            self._end_units_after(unit)
            self._forward.unshard(unit)
            self._begin_unit(unit)

    def _begin_unit(self, unit: str) -> None:
        self.program.executor.begin(self.program.computing("backward", unit, self.state.micro_batch))

    @gives_up
    def meet_gradient(self, parameter: nn.Parameter, is_sparse: bool) -> None:
        """Begins a pass that nothing has told of before a parameter did, and follows to where autograd adds."""
        if self.has_streams:
            # Autograd adds on the stream of the forward that first used the parameter in a graph that still lives,
            # which need not be that of the backward that copies the gradient.
            self.program.executor.follow()
        if self.state.phase != "backward":
            self._begin_in_autograd()
        if is_sparse and parameter.grad is not None:
            # From now on: flat buffers hold no other.
            parameter.grad = parameter.grad.to_dense()

    def _follows(self, unit: str | None, generation: int) -> bool:
        """Whether the backward under way is this model's; begins it where it is new."""
        if self.autograd.hands_out(unit) if self.state.phase == "backward" else not self.autograd.is_ours(unit):
            return False
        self.state.require_current(generation)
        if self.state.phase != "backward":
            self._begin_in_autograd()
        return True

    # ---- the pass

    def idle(self) -> None:
        """Takes part in the communication of a micro-batch that other ranks have and this one has not."""
        self._forward.enter()
        self.program.executor.skip("gather")
        self._begin()
        self._end()

    def reset(self) -> None:
        """Forgets the pass under way. A collective call."""
        self._outstanding.clear()
        self._uncopied.clear()
        self.autograd.forget()
        self.order.reset()

    def _begin_in_autograd(self) -> None:
        self._begin()
        self.autograd.begin()

    def _begin(self) -> None:
        program, state = self.program, self.state
        program.structure.require_unchanged()
        program.parameters.conversions.require_none()
        reduced = state.gradients == "reduced"
        state.begin_backward()
        self._forward.idle_ranks.begin_backward(state.synchronises)
        if state.micro_batch == 0:
            # Not in the middle of a step, whose gradients lie as the order so far has it.
            self.autograd.adopt_orders()
        self._begun.clear()
        self.fired.clear()
        self._over.clear()
        self._over_from = len(program.schedule.order)
        self._incomplete.clear()
        program.executor.load(state.step, program.schedule.backward(state.micro_batch, state.synchronises))
        program.tables.begin()
        if program.gradients is not None:
            self._uncopied = list(program.schedule.copied_units)
            program.gradients.begin(state.micro_batch, state.synchronises, reduced)

    def _end_units_after(self, unit: str) -> None:
        """The backward of every unit that runs after this one is over: it is resharded, and copied in if complete."""
        schedule = self.program.schedule
        if unit not in schedule.position:
            return
        after = schedule.position[unit] + 1
        over = schedule.order[after : self._over_from][::-1]
        self._over_from = min(after, self._over_from)
        self._over.update(over)
        for other in over:
            self._reshard(other)
        self._copy_in_order()

    def _reshard(self, unit: str) -> None:
        key = Key("reshard", unit, self.state.micro_batch, "backward")
        if self.program.executor.knows(key):
            self.program.parameters.reshard((unit,))
            self.program.executor.mark(key)

    def _copy_in_order(self, all_complete: bool = False) -> None:
        """Copies units in, in the order of the schedule, as far as their gradients are complete: all are at the end."""
        early = self.program.schedule.copied_early
        while self._uncopied and (unit := self._uncopied[0]) in early:
            if unit not in self._over or not (all_complete or self._is_complete(unit)):
                break
            self._copy_in(unit)

    def _is_complete(self, unit: str) -> bool:
        """Whether autograd will add nothing more to the gradients of a unit's parameters."""
        parameters = self.program.parameters.all
        for index in self.program.slots_of(unit):
            parameter = parameters[index]
            if id(parameter) in self.fired or not parameter.requires_grad:
                continue
            if not is_complete(parameter):
                self._incomplete.add(index)
                return False
        return True

    def _copy_in(self, unit: str) -> None:
        """Takes the gradients of a unit into their buckets, which launches the reductions that waited for them."""
        program = self.program
        assert program.gradients is not None
        key = Key("copy_in", unit, self.state.micro_batch, "backward")
        program.executor.begin(key)
        program.gradients.copy_in(program.slots_of(unit))
        program.executor.end()
        self._uncopied.remove(unit)
        program.executor.done(key)

    def _end(self) -> None:
        program, state = self.program, self.state
        executor, gradients = program.executor, program.gradients
        executor.end()
        for unit in reversed(program.schedule.order):
            if unit not in self._over:
                self._over.add(unit)
                self._reshard(unit)
            # In turn, so that a rank without this micro-batch launches in the order of those that have it.
            self._copy_in_order(all_complete=True)
        # For units that this rank did not run and others may still have to, before it waits for their gradients.
        executor.skip("gather")
        if gradients is not None:
            for unit in list(self._uncopied):
                self._copy_in(unit)
            after_copy_in = gradients.after_copy_in()
            gradients.note_after_copy_in(after_copy_in)
            if program.collectives is None:
                gradients.copy_in(after_copy_in)
            if state.synchronises:
                self._synchronise(gradients, after_copy_in)
        executor.skip_all() if not state.synchronises else executor.complete()
        if state.synchronises:
            program.statistics.close()
        if program.schedule.reshards_after_forward:
            # Units that ran several times, or in another order. What is kept for the step stays until the update.
            program.parameters.reshard(program.schedule.gathered_units)
        if gradients is not None and not state.synchronises:
            gradients.end_local()
        self._outstanding.clear()
        state.end_backward()
        self.when_over()

    def _synchronise(self, gradients: Gradients, after_copy_in: Sequence[int]) -> None:
        """Lets the ranks agree on a step, waits for its reductions and publishes them. A collective call.

        Args:
            gradients: The model's, all copied in.
            after_copy_in: Indices of parameters to whose gradient autograd has added after its copy-in.

        Raises:
            EngineError: Ranks saw the step differently.
        """
        program, executor, micro_batch = self.program, self.program.executor, self.state.micro_batch
        statistics, buffers, first = program.statistics, program.module_buffers, self.state.step == 0
        used: Collection[int] = gradients.used_in_step
        incomplete = sorted(self._incomplete.union(after_copy_in))
        if program.collectives is not None:
            key = Key("statistics", STATISTICS, micro_batch, "backward")
            if program.schedule.has_followers:
                # No forward has waited for what this rank did not run, and weights are about to be compared.
                self._forward.wait_for_updates()
            executor.begin(key)
            weights = weights_hash(program.parameters.all) if program.schedule.has_followers else 0
            checks = (micro_batch, executor.launched.take(), weights)
            statistics.fill(used, incomplete, gradients.own_norms(), checks, buffers.unknown())
            executor.end()
            executor.done(key)
        publish = Key("publish", GRADIENTS, micro_batch, "backward")
        widen = publish._replace(kind="widen")
        key = widen if executor.knows(widen) else publish
        executor.begin(key)
        if program.collectives is not None:
            statistics.require_alike()
            if again := statistics.incomplete(incomplete, first):
                self._reduce_again(gradients, after_copy_in, again)
            if statistics.changes_buffers(first):
                buffers.agree()
            # No other rank need be asked where every parameter has a gradient on this one.
            used = used if len(used) == len(gradients.flat.trainable) else statistics.used()
        norms = statistics.norms(gradients.flat.trainable, program.schedule.replicas)
        gradients.publish(used, bool(program.schedule.updated_buckets), norms)
        executor.end()
        executor.done(key)
        if key is widen:
            executor.mark(publish)
        program.send_buffers(micro_batch, "backward")

    def _reduce_again(self, gradients: Gradients, mine: Sequence[int], anyones: Sequence[int]) -> None:
        """Reduces what came after its unit was copied in; from now on these units wait for the whole backward."""
        program = self.program
        for bucket in program.schedule.reduced_buckets:
            if not set(anyones).isdisjoint(bucket.slots):
                program.reduce_again(bucket, mine, self.state.micro_batch)
        program.defer(program.parameters.flat.units_of(anyones))
        self.order.slots_changed = program.schedule.reuses_gradient_slots
        norms = program.statistics.fill_norms(gradients.own_norms())
        program.sum(norms, "norms of gradients", self.state.micro_batch, "backward")
