"""Parameters when they are needed: unsharded for a unit's computing, resharded after it, gathered after an update."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from paceline.core.errors import EngineError
from paceline.core.layout import ROOT, Bucket
from paceline.core.ops import EXTRA, WRITTEN, Key, Phase
from paceline.core.step_state import StepState
from paceline.engine.full_parameters import FullParameters
from paceline.engine.program import Program
from paceline.executor.idle_ranks import IdleRanks
from paceline.hooks.modules import in_backward
from paceline.hooks.refused_passes import refuse_graph, refuse_model, refuse_unit
from paceline.hooks.units_under_way import UnitsUnderWay


class ForwardPass:
    """Follows forward passes, of training or not, and unshards parameters there and in backward.

    Attributes:
        order: Units in the order in which the first forward runs them.
        whole: All parameters whole and as they are updated, on demand.
        idle_ranks: Those that have no micro-batch while others have one.
        under_way: The units whose forward has begun and not ended, and those that are a part of others'.
    """

    def __init__(self, program: Program, state: StepState) -> None:
        """Follows nothing yet."""
        self._program, self._state = program, state
        self.order: list[str] = []
        self.whole = FullParameters(program, state, self)
        self.idle_ranks = IdleRanks(program.collectives, program.strategy, type(program.module).__name__)
        self.under_way = UnitsUnderWay()
        self._index = self._depth = 0
        self._thread: threading.Thread | None = None
        self.end_raised_update: Callable[[], None] = lambda: None

    @property
    def is_computing(self) -> bool:
        """Whether a forward or backward is under way, in whichever thread."""
        return bool(self._depth) or self._state.phase != "idle" or in_backward()

    @property
    def is_beside(self) -> bool:
        """Whether this thread is beside the one that trains."""
        trains = self._thread
        return trains not in (None, threading.current_thread()) and trains.is_alive() and not in_backward()

    # ---- a pass

    def root_pre_forward(self, records: bool) -> None:
        """The whole model's forward begins."""
        self._depth += 1
        self._adopt_buffers(records)
        if self.whole.is_full:
            refuse_graph(records)
            return
        if self._program.schedule.shards_parameters:
            refuse_model()
        if records:
            self.enter()
            self._require_one_thread()
            if not self._program.schedule.order:
                self._begin_unit(ROOT)
        elif not in_backward():
            if self._state.phase == "idle":
                self._program.parameters.narrow()
            if self._program.schedule.shards_parameters:
                self.idle_ranks.require_none("a forward without gradients, which gathers all units,")
                self._load_extra()
            self._unshard_idle()

    def root_post_forward(self) -> None:
        """The whole model's forward has ended."""
        self._depth = max(0, self._depth - 1)
        if not in_backward() and not self.whole.is_full:
            self._program.executor.end()
            self._program.executor.skip("gather")

    def pre_forward(self, unit: str, records: bool) -> None:
        """A unit's forward begins."""
        if self._program.schedule.reshards_after_forward:
            refuse_unit(unit, records)
            self.under_way.require_no_circle()
        self._adopt_buffers(records)
        if self.whole.is_full:
            refuse_graph(records)
            return
        if records:
            self.enter()
        if not records or self.under_way.is_inside:
            self._unshard_to_compute(unit)
            return
        if unit not in self.order:
            self.order.append(unit)
        self._begin_unit(unit)

    def _adopt_buffers(self, records: bool) -> None:
        """One of training, which `enter`s, may be a part of a forward whose graph needs them as they are."""
        if not records and not in_backward():
            self._program.module_buffers.adopt()

    def _begin_unit(self, unit: str) -> None:
        executor = self._program.executor
        executor.end()
        key = self._program.computing("forward", unit, self._index)
        executor.require(executor.after(key))
        self._unshard_to_compute(unit)
        executor.begin(key)

    def post_forward(self, unit: str) -> None:
        """A unit's forward has ended."""
        program = self._program
        if in_backward() or self.whole.is_full or self.under_way.is_inside:
            return
        program.executor.end()
        if unit in program.schedule.slot and program.schedule.reshards_after_forward:
            program.parameters.reshard((unit,))
            program.executor.mark_known(Key("reshard", unit, self._index, "forward"))

    def enter(self) -> None:
        """A training forward goes on, or begins.

        Raises:
            EngineError: It cannot begin here.
        """
        kind = self._state.begin_forward()
        if kind == "within":
            return
        self._thread = threading.current_thread()
        self.whole.close_states()
        self._program.module_buffers.adopt()
        if self._program.strategy.low:
            # What was not laid out is not cast, and its forward would end in torch's words.
            self._program.structure.require_nothing_added()
        if kind == "extra" or self._state.micro_batch == 0:
            # An edit is computed with; the update, in which it would be lost, looks closer.
            self._program.parameters.require_unedited(wholly=False)
        if kind == "extra":
            self._load_extra()
        else:
            self._program.parameters.unpin()
            self._index = self._state.micro_batch
            self._program.executor.load(self._state.step, self._program.schedule.forward(self._index))
        self._unshard_idle()

    def _require_one_thread(self) -> None:
        """Refuses whole forwards that backward computes in turns: autograd orders what each thread did by itself."""
        if self._program.schedule.reshards_after_forward and threading.current_thread() is not self._thread:
            raise EngineError(
                "forwards before one backward run in more than one thread, so that backward goes through the units of "
                "each in turns, while zero=3 reshards a unit once the one before it begins. Run them in one thread, "
                "call backward after each, or set strategy.zero to 2 or less, or strategy.accumulation to hold"
            )

    def _load_extra(self) -> None:
        self._index, gathers = EXTRA, self._program.schedule.shards_parameters
        if gathers:
            self.idle_ranks.begin_extra_forward()
        ops = self._program.schedule.extra_forward() if gathers else ()
        self._program.executor.load(self._program.executor.step, ops)

    def _unshard_idle(self) -> None:
        """Unshards what no unit's forward will: parameters that a container holds, or units that never run."""
        schedule, parameters = self._program.schedule, self._program.parameters
        if schedule.shards_parameters:
            self._gather_kept()
        elif parameters.flat.managed:
            for unit in self._program.layout.units:
                if unit not in schedule.order:
                    self.unshard(unit)

    # ---- unsharding

    def _unshard_to_compute(self, unit: str) -> None:
        """Unshards a unit for its forward: one that others run inside theirs in memory of its own, as they need it."""
        parameters, schedule = self._program.parameters, self._program.schedule
        if unit not in self.under_way.inner or unit not in schedule.slot or not schedule.reshards_after_forward:
            self.unshard(unit)
            return
        self.idle_ranks.require_of_own_model(unit)
        for index in parameters.flat.managed_of.get(unit, ()):
            if index not in parameters.pinned.views:
                self.pin(index, f"{unit} runs inside another unit")

    def unshard(self, unit: str) -> None:
        """Makes a unit's parameters usable: waits for their gather, or gathers out of turn."""
        schedule, executor, parameters = self._program.schedule, self._program.executor, self._program.parameters
        if not parameters.flat.managed:
            return
        if not schedule.shards_parameters:
            self._wait_for_update(unit)
            parameters.unshard((unit,))
            return
        self.idle_ranks.require_of_own_model(unit)
        if not parameters.unsharded.holds_kept():
            self._gather_kept()
        if unit not in schedule.slot:
            parameters.unshard((unit,))
            return
        phase: Phase = "backward" if in_backward() else "forward"
        index = self._state.micro_batch if phase == "backward" else self._index
        key = Key("unshard", unit, index, phase)
        executor.require(executor.after(key) if executor.knows(key) else ())
        executor.require_arrived({bucket.name for bucket in schedule.gathered_buckets[unit]})
        if parameters.is_open(unit) and parameters.unsharded.holds(unit):
            return
        if not parameters.unsharded.holds(unit):
            # Not what the schedule foresaw, such as a second forward before backward.
            self.idle_ranks.require_none(f"{unit} is gathered in another order than planned")
            executor.drop("gather")
            executor.settle_stream("gather")
            executor.run(schedule.gather_again(unit, index, phase))
        parameters.unshard((unit,))
        executor.mark_known(key)

    def _wait_for_update(self, unit: str) -> None:
        if buckets := self.updates_of(unit):
            self._program.executor.require_arrived(buckets)
            self._program.parameters.arrived(buckets)

    def updates_of(self, unit: str) -> set[str]:
        """The buckets of a unit whose updates are under way."""
        schedule, waiting = self._program.schedule, self._program.parameters.waiting
        names = {WRITTEN} if schedule.shares_memory else {b.name for b in schedule.buckets_of.get(unit, ())}
        return names & waiting

    def wait_for_updates(self) -> None:
        """Waits until every rank's update is here."""
        self.end_raised_update()
        self._program.executor.settle()
        self._program.parameters.arrived(tuple(self._program.parameters.waiting))

    def _gather_kept(self) -> None:
        schedule, executor, parameters = self._program.schedule, self._program.executor, self._program.parameters
        executor.require(op.key for op in schedule.gather_kept() if executor.knows(op.key))
        if not parameters.unsharded.holds_kept():
            executor.run(schedule.gather_kept_again())
        parameters.unshard({unit: None for bucket in schedule.kept_buckets for unit in bucket.units})

    def pin(self, index: int, why: str) -> None:
        """A sharded parameter is gathered by itself, for `why`, and stays until the next forward or update."""
        schedule = self._program.schedule

        def gather(bucket: Bucket, memory: Tensor) -> None:
            op = schedule.gather_pinned(bucket, "backward" if in_backward() else "forward")
            self._program.executor.run([op], self._program.gather_into(op, bucket, memory))

        self.idle_ranks.require_none(why)
        self._program.parameters.pin(index, gather)

    def gather_update(self) -> None:
        """Gathers whole parameters, as after an update, and waits for them."""
        self._program.executor.run(self._program.schedule.gather_update_again())
        self._program.parameters.waiting.clear()

    def reset(self) -> None:
        """Forgets the pass under way."""
        self._depth = 0
        self.idle_ranks.reset()
        self.whole.close_states()
