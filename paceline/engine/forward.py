"""Parameters when they are needed: whole for a unit's computing, let go after it, gathered after an update."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from paceline.engine.hooks import in_backward
from paceline.engine.progress import EngineError
from paceline.engine.running import Running
from paceline.ops import READ, WRITTEN, Key, Phase


class ForwardPass:
    """Follows forward passes, of training or not, and brings parameters there and in backward.

    Attributes:
        order: Units in the order in which the first forward runs them.
        is_full: Whether all parameters are whole and as they are updated.
    """

    def __init__(self, running: Running) -> None:
        """Leaves parameters as they are when nothing computes with them."""
        self._running = running
        self.order: list[str] = []
        self._walk = 0
        self.is_full = False
        self._states: list[AbstractContextManager[None]] = []
        running.weights.rest()
        running.weights.seal()

    # ---- a pass

    def model_begins(self, records: bool) -> None:
        """The whole model's forward begins."""
        if self.is_full:
            self._refuse_graph(records)
        elif records and self.enter():
            return
        elif self._running.schedule.gathers_units and not in_backward():
            # Another walk over the units, which gathers them all.
            self._load(0)
        elif not records:
            self._settle_update()

    def model_ends(self) -> None:
        """The whole model's forward has ended."""
        if not in_backward():
            self._running.executor.end()
            self._running.executor.launch_left("gather")

    def unit_begins(self, unit: str, records: bool) -> None:
        """A unit's forward begins."""
        if self.is_full:
            self._refuse_graph(records)
            return
        if records:
            self.enter()
            if unit not in self.order:
                self.order.append(unit)
            self._running.executor.begin(Key("forward", unit, self._running.progress.micro_batch, "forward"))
        self.bring(unit)

    def unit_ends(self, unit: str) -> None:
        """A unit's forward has ended."""
        if in_backward() or self.is_full:
            return
        self._running.executor.end()
        if unit in self._running.schedule.place:
            self._hold_accumulators((unit,))
            self.let_go(unit)
            self._running.executor.done(Key("forward", unit, self._walk, "forward"))

    def enter(self) -> bool:
        """A training forward goes on; returns whether it began a micro-batch."""
        if not self._running.progress.begin_forward():
            return False
        self.close_states()
        if self._running.weights.swapped and self._running.progress.micro_batch == 0:
            self._running.weights.require_sealed()
        if self._running.gradients is not None:
            self._running.gradients.forget_zeroed()
        self._load(self._running.progress.micro_batch)
        return True

    def _load(self, index: int) -> None:
        schedule, executor, weights = self._running.schedule, self._running.executor, self._running.weights
        self._walk = index
        executor.load(self._running.progress.step, schedule.forward(index))
        if schedule.gathers_after_update or schedule.shares:
            executor.require(schedule.sent_before[1])
        if schedule.gathers_units:
            self._bring_residents()
        elif weights.swapped:
            weights.show_whole(self._running.layout.units)
            self._hold_accumulators(self._running.layout.units)

    def _hold_accumulators(self, units: Collection[str]) -> None:
        if self._running.weights.dtype_changes:
            self._running.arranged.hold_accumulators(units)

    # ---- bringing

    def bring(self, unit: str) -> None:
        """Makes a unit's parameters whole, if they are not: waits for their gather, or gathers out of turn."""
        schedule, executor, weights = self._running.schedule, self._running.executor, self._running.weights
        if not weights.swapped:
            return
        if not schedule.gathers_units:
            if not in_backward():
                weights.show_whole(self._running.layout.units)
            return
        if not weights.gathered.holds_residents():
            self._bring_residents()
        if unit not in schedule.place:
            return
        phase: Phase = "backward" if in_backward() else "forward"
        index = self._running.progress.micro_batch if phase == "backward" else self._walk
        executor.require(executor.after(Key(phase, unit, index, phase)))
        executor.require_arrived("gather", {bucket.name for bucket in schedule.moving[unit]})
        if not weights.gathered.holds(unit):
            # Not what the schedule foresaw, such as a second forward before backward.
            executor.drop("gather")
            executor.settle_stream("gather")
            for bucket in schedule.moving[unit]:
                executor.run(schedule.gather(bucket, index, phase))
        weights.show_whole((unit,))

    def let_go(self, unit: str) -> None:
        """Lets a unit's parameters be pieces again, so that using them out of turn is an error and not stale."""
        if self._running.schedule.lets_go and unit in self._running.schedule.place:
            self._running.weights.let_go((unit,))

    def _bring_residents(self) -> None:
        schedule, executor, weights = self._running.schedule, self._running.executor, self._running.weights
        ops = [schedule.gather(bucket, 0, "forward") for bucket in schedule.residents]
        executor.require(op.key for op in ops)
        if not weights.gathered.holds_residents():
            for op in ops:
                executor.run(op)
        units = {unit: None for bucket in schedule.residents for unit in bucket.units}
        weights.show_whole(units)
        self._hold_accumulators(units)

    def gather_update(self) -> None:
        """Gathers whole parameters, as after an update, and waits for them.

        Where the step has no number of its own yet, its forward could not tell them from its own gathers.
        """
        if self._running.schedule.gathers_after_update:
            update, *gathers = self._running.schedule.update(self._running.progress.last_micro_batch)
            self._running.executor.load(self._running.progress.step, gathers)
            self._running.executor.done(update.key)
            self._running.executor.settle()

    def _settle_update(self) -> None:
        """Waits for gathers that no scheduled op will wait for, and shows what they brought."""
        if in_backward() or not self._running.weights.swapped or self._running.schedule.gathers_units:
            return
        self._running.executor.settle()
        self._running.weights.show_whole(self._running.layout.units)

    # ---- whole parameters, for reading, editing, saving and loading

    @contextmanager
    def full(self, edits: bool = True) -> Iterator[None]:
        """Inside, every parameter is whole and as it is updated. A collective call where they are sharded.

        Args:
            edits: Whether they may be written to. Where ranks share one copy, only that is a collective call.
        """
        if self.is_full or not self._running.weights.swapped:
            yield
            return
        self._running.executor.settle()
        self._running.weights.require_sealed()
        self.is_full = True
        synchronizer = self._running.synchronizer
        shared_by = synchronizer if edits and self._running.schedule.shares else None
        try:
            with self._running.weights.full(synchronizer.gather if synchronizer else None, edits):
                try:
                    yield
                finally:
                    # What is written on leaving must not reach a rank that has yet to take its copy.
                    if shared_by is not None:
                        shared_by.barrier(READ)
        finally:
            self.is_full = False
        if shared_by is not None:
            shared_by.barrier(WRITTEN)

    def open_states(self, edits: bool) -> None:
        """Enters `full`, until `close_state`."""
        self._states.append(self.full(edits))
        self._states[-1].__enter__()

    def close_state(self) -> None:
        """Leaves what `open_states` entered last."""
        self._states.pop().__exit__(None, None, None)

    def close_states(self) -> None:
        """Leaves what a `load_state_dict` that raised left open."""
        while self._states:
            self.close_state()

    def _refuse_graph(self, records: bool) -> None:
        if records:
            raise EngineError(
                "a forward with gradients inside pl.full_parameters: its backward would not be reduced. Train outside "
                "of it; evaluate inside it under torch.no_grad()"
            )
