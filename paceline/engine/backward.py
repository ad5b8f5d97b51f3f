"""One backward pass: gradients are collected unit by unit, which launches their reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.autograd import Variable

from paceline.engine.agreement import agree_on_order
from paceline.engine.forward import ForwardPass
from paceline.engine.progress import EngineError
from paceline.engine.running import Running
from paceline.ops import COUNTS, Key


class BackwardPass:
    """Follows backward passes.

    Attributes:
        reduced_late: Whether gradients came after their unit was collected in the latest synchronised one.
    """

    def __init__(self, running: Running, forward: ForwardPass) -> None:
        """Takes the forward order from `forward`, which also brings parameters."""
        self._running, self._forward = running, forward
        self.reduced_late = False
        self._knows_order = False
        self._improvises = False
        self._places_changed = False
        self._outstanding: Counter[str] = Counter()
        self._uncollected: list[str] = []
        self._over: set[str] = set()
        self._begun: set[str] = set()
        self._ignored_pass = -1

    # ---- what the hooks tell

    def forward_ended(self, unit: str) -> None:
        """A unit has run forward, and its backward is to follow."""
        self._outstanding[unit] += 1

    def wants(self, unit: str) -> bool:
        """Whether a unit whose first forward ran inside a reentrant checkpoint has yet to be followed."""
        return unit in self._uncollected and unit not in self._begun and self._outstanding[unit] == 0

    def unit_nears(self, unit: str, generation: int) -> None:
        """The first gradient of a unit with several outputs is there."""
        if self._follows(generation) or self._running.schedule.gathers_units:
            self._forward.bring(unit)

    def unit_begins(self, unit: str | None, generation: int) -> None:
        """The backward of a unit begins, or (None) that of the whole model."""
        follows = self._follows(generation)
        if unit is None:
            return
        if self._running.schedule.lets_go:
            self._refuse_graph(unit)
            if not follows:
                # torch.autograd.grad computes with the parameters too.
                self._forward.bring(unit)
        if follows:
            self._begun.add(unit)
            self._outstanding[unit] -= 1
            self._running.executor.end()
            self._collect(self._finished_by(unit))
            self._running.executor.begin(Key("backward", unit, self._running.progress.micro_batch, "backward"))
            self._forward.bring(unit)

    def _follows(self, generation: int) -> bool:
        """Whether the backward under way is this model's; begins it where it is new."""
        progress = self._running.progress
        if progress.phase != "backward" and not self._is_ours():
            return False
        progress.require_current(generation)
        if progress.phase != "backward":
            self._begin()
            # Queued from the outermost graph: from inside a reentrant checkpoint it would run when that one ends.
            Variable._execution_engine.queue_callback(self._end)
        return True

    def _is_ours(self) -> bool:
        """Whether the pass that begins leaves gradients in parameters; if not, all of its hooks are passed over."""
        self._running.arranged.require_unchanged()
        this_pass = torch._C._current_graph_task_id()
        if this_pass != self._ignored_pass and not self._running.arranged.differentiates_parameters():
            self._ignored_pass = this_pass
        return this_pass != self._ignored_pass

    def _refuse_graph(self, unit: str) -> None:
        if torch.is_grad_enabled():
            raise EngineError(
                f"backward with create_graph=True: the graph of the gradients uses {unit}'s parameters when they "
                "may have been let go again. Set strategy.zero to 2 or less, or strategy.accumulation to hold"
            )

    # ---- the pass

    def idle(self) -> None:
        """Takes part in the communication of a micro-batch that other ranks have and this one has not."""
        self._forward.enter()
        self._running.executor.launch_left("gather")
        self._begin()
        self._end()

    def reset(self) -> None:
        """Forgets the pass under way."""
        self._outstanding.clear()
        self._uncollected.clear()

    def _begin(self) -> None:
        running, progress = self._running, self._running.progress
        progress.begin_backward()
        self._adopt_order()
        if self._places_changed and progress.micro_batch == 0:
            running.allocate_gradients()
            self._places_changed = False
        self._begun.clear()
        self._over.clear()
        if running.gradients is not None:
            self._uncollected = list(running.schedule.collected)
            running.gradients.begin(progress.micro_batch, progress.synchronises)
            running.gradients.allocate_sums()
        running.executor.load(progress.step, running.schedule.backward(progress.micro_batch, progress.synchronises))
        if self._improvises:
            running.executor.drop("gather")

    def _adopt_order(self) -> None:
        """The first forward shows in which order units really run: the same for all ranks, rank 0's."""
        if self._knows_order:
            return
        self._knows_order = True
        running = self._running
        if running.schedule.gathers_units and running.synchronizer is not None:
            # A rank that ran its units in another order may still wait for one to be gathered: so both are told.
            running.executor.settle_stream("gather")
            running.synchronizer.meet("order of units")
        order = tuple(agree_on_order(self._forward.order, running.world))
        if order != running.schedule.order:
            if running.weights.swapped:
                # Pieces stay where they are, for an optimizer may have made its states for them.
                running.arranged.reorder(order)
                self._improvises = running.schedule.gathers_units
            else:
                running.arranged = running.arrange(order)
        running.allocate_gradients()

    def _finished_by(self, unit: str) -> list[str]:
        """Units whose backward is over when that of `unit` begins: all their gradients exist."""
        running = self._running
        after = running.arranged.units_after(unit)
        if not running.schedule.rotates:
            return [other for other in self._uncollected if other in after and self._outstanding[other] <= 0]
        if running.schedule.place:
            over = after - self._over
            self._over |= over
            running.executor.done(*(Key("backward", other, running.progress.micro_batch, "backward") for other in over))
        return [other for other in self._uncollected if other in after]

    def _collect(self, units: Sequence[str]) -> None:
        """Takes the gradients of `units` into their buckets, which launches the reductions that waited for them."""
        running = self._running
        for unit in units:
            assert running.gradients is not None
            key = Key("collect", unit, running.progress.micro_batch, "backward")
            running.executor.begin(key)
            self._look(running.arranged.slots_of(unit))
            running.gradients.collect(running.arranged.slots_of(unit))
            running.executor.end()
            if unit not in running.schedule.late:
                self._forward.let_go(unit)
            self._uncollected.remove(unit)
            running.executor.done(key)

    def _end(self) -> None:
        running, gradients = self._running, self._running.gradients
        synchronises = running.progress.synchronises
        running.executor.end()
        # For units that this rank did not run and others may still have to, before it waits for their gradients.
        running.executor.launch_left("gather")
        self._collect(list(self._uncollected))
        late = gradients.late() if gradients and synchronises else []
        if gradients is not None:
            gradients.used.update(late)
            self._look(late)
            if running.synchronizer is None:
                gradients.collect(late)
                gradients.add_all_reduced()
        self._complete(late)
        if gradients is not None and synchronises:
            used: Collection[int] = gradients.used
            if running.synchronizer is not None:
                self._reduce_late(late, running.counts.late(late, first=running.progress.step == 0))
                used = used if gradients.complete else running.counts.used()
            running.weights.rest_in_pieces()
            gradients.publish(used, keep=running.world.rank == 0 or not running.served)
        elif gradients is not None:
            gradients.end_local()
        if self._improvises:
            running.weights.rest()
            running.weights.assign_places(running.schedule)
            self._improvises = False
        running.counts.close(synchronises, running.world.world_size)
        self._outstanding.clear()
        running.progress.end_backward()

    def _look(self, indices: Iterable[int]) -> None:
        counts, parameters = self._running.counts, self._running.weights.parameters
        if counts.looks:
            counts.look([grad for i in indices if (grad := parameters[i].grad) is not None and not grad.is_sparse])

    def _complete(self, late: Sequence[int]) -> None:
        """Lets the ranks agree on a synchronised step and waits for its collectives."""
        running, gradients = self._running, self._running.gradients
        if not running.progress.synchronises:
            running.executor.launch_all()
            return
        if gradients is not None and running.synchronizer is not None:
            running.executor.begin(Key("measure", COUNTS, running.progress.micro_batch, "backward"))
            squares = gradients.square_sum() if running.schedule.shards > 1 else None
            running.counts.fill(gradients.used, late, squares, gradients.carries)
        running.executor.complete()

    def _reduce_late(self, mine: Sequence[int], anyones: Sequence[int]) -> None:
        """Reduces what came after its unit was collected; from now on these units wait for the whole backward."""
        running = self._running
        self.reduced_late = bool(anyones)
        if not anyones or running.synchronizer is None or running.gradients is None:
            return
        for bucket in running.schedule.reduced:
            if not set(anyones).isdisjoint(bucket.slots):
                op = running.schedule.reduce(bucket, running.progress.micro_batch)[0]
                allocate = running.synchronizer.transports["reduce"].allocate
                spare = allocate(bucket.numel, running.gradients.whole(bucket).dtype)
                work = running.synchronizer.late_work(op, running.weights, running.gradients, mine, spare)
                running.executor.run(op, work)
        running.arranged.mark_late(anyones)
        self._places_changed = running.schedule.rotates
