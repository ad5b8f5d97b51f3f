"""Steps in which a loop asks for what no step plans, for the checker to prove as it proves those that are planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from paceline.core.ops import EXTRA, Key, Op
from paceline.core.schedule import Schedule


def busy_step(schedule: Schedule, micro_batches: int) -> tuple[Op, ...]:
    """A step of so many micro-batches with everything between and in its passes that data may ask for.

    Forwards for evaluation or logging come before every micro-batch, before the update and after it, the units of every
    forward run in the reverse of the order that is planned and then once more, parameters are used outside of their
    units, ranks meet before the first backward, gradients come after their buckets were reduced, buffers are sent, and
    what was updated is gathered again.

    Returns:
        Ops as `Schedule.step` returns them. Each that is not planned has a micro-batch of its own, from -3 down.
    """
    step = _Busy(schedule)
    step.gather_update()
    for index in range(micro_batches):
        step.extra_forward()
        step.follow(schedule.forward(index), schedule.computed_units[::-1])
        step.second_forward(index)
        step.pin()
        if not index:
            step.meet()
        step.follow(schedule.backward(index, index == micro_batches - 1))
    step.extra_forward()
    step.follow(schedule.update(micro_batches - 1))
    return tuple(step.ops)


def lone_step(schedule: Schedule) -> tuple[Op, ...]:
    """A step of an optimizer that no backward came before, but an evaluation: of weights that a loop gave gradients."""
    step = _Busy(schedule)
    step.gather_update()
    step.extra_forward()
    step.follow(schedule.lone_update(0))
    return tuple(step.ops)


def step_around_passes(schedule: Schedule, micro_batches: int) -> tuple[Op, ...]:
    """The passes of a step that an optimizer runs inside its own, and the update that it goes on with behind them."""
    step = _Busy(schedule)
    step.gather_update()
    for index in range(micro_batches):
        step.follow(schedule.forward(index))
        step.follow(schedule.backward(index, index == micro_batches - 1))
    step.follow(schedule.update_around_passes(micro_batches - 1))
    return tuple(step.ops)


class _Busy:
    """The ops of a step so far, by the engine's rules: what is launched when, and gathered as it is not there.

    Attributes:
        ops: In an order in which they may run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.ops: list[Op] = []
        self._schedule = schedule
        self._unit_of = {b.name: unit for unit, buckets in schedule.gathered_buckets.items() for b in buckets}
        self._held: dict[int, str] = {}
        self._waits: list[Key] = []
        self._numbers = count(EXTRA - 1, -1)

    # ---- what data asks for

    def extra_forward(self) -> None:
        """A pass that is no part of the step."""
        number = next(self._numbers)
        self.follow(
            [
                replace(op, micro_batch=number, after=tuple(key._replace(micro_batch=number) for key in op.after))
                for op in self._schedule.extra_forward()
            ]
        )

    def second_forward(self, index: int) -> None:
        """All units run once more before the backward of a micro-batch, and nothing is planned to be gathered."""
        number, ops = next(self._numbers), self._schedule.forward(index)
        self.follow([replace(op, micro_batch=number, after=(), planned=False) for op in ops if op.stream == "compute"])

    def gather_update(self) -> None:
        """What ranks need of the update before: all that it sends, and once more, and what is gathered once a step."""
        self._waits += sorted(self._schedule.of_step_before)
        self._run(self._schedule.gather_update_again())
        if self._schedule.shards_parameters:
            self._run(self._schedule.gather_kept_again())

    def pin(self) -> None:
        """Parameters that are used outside of their units are gathered into memory of their own."""
        if self._schedule.shards_parameters:
            self._run(self._schedule.gather_pinned(bucket, "forward") for bucket in self._schedule.layout.buckets)

    def meet(self) -> None:
        """Ranks wait for each other before the first backward, as each may have run units in an order of its own."""
        if self._schedule.shards_parameters:
            self._run((self._schedule.meet("start of the first backward", "backward"),))

    def _reduce_again(self, index: int) -> None:
        """Gradients that came late are reduced from memory of their own, and what ranks agree on is summed again."""
        for bucket in self._schedule.reduced_buckets:
            for op in self._schedule.reduce_again(bucket, index):
                self._run((op,))
        self._run((self._schedule.sum_numbers("norms of gradients", index, "backward", 1),))

    # ---- the rules

    def _run(self, ops: Iterable[Op]) -> None:
        """Launches collectives, and waits for them."""
        number, before = next(self._numbers), self._over()
        for op in ops:
            self._add(replace(op, micro_batch=number, after=before))
            self._waits.append(self.ops[-1].key)

    def follow(self, planned: Sequence[Op], order: Sequence[str] = ()) -> None:
        """Runs a pass: with the first unit that is not gathered when it runs, what was planned to be gathered is over.

        Args:
            planned: Its ops.
            order: In which its units run, where it is another than planned.
        """
        before = self._over()
        gathers = deque(op for op in planned if op.stream == "gather" and op.phase != "update")
        rest = [op for op in planned if op.stream != "gather" or op.phase == "update"]
        if order:
            # Whichever is the first waits for what the first was to wait for.
            self._waits += next(op.after for op in rest if op.kind == "forward")
            rest = [op for unit in order for op in rest if op.target == unit]
        queued, done, dropped = {op.key for op in gathers}, set[Key](), set[Key]()

        def launch() -> None:
            # One that is waited for earlier than planned does not wait for what has yet to run.
            gather = gathers.popleft()
            queued.remove(gather.key)
            if not done.issuperset(gather.after):
                gather = replace(gather, after=self._over())
            self._add(_also(gather, before))
            done.add(gather.key)

        for op in rest:
            while gathers and done.issuperset(gathers[0].after):
                launch()
            while not queued.isdisjoint(op.after):
                launch()
            if op.kind == "unshard" and self._held.get(self._schedule.slot[op.target]) != op.target:
                dropped |= queued
                queued.clear()
                gathers.clear()
                self._run(self._schedule.gather_again(op.target, op.micro_batch, op.phase))
            if op.kind in ("widen", "publish") and self._schedule.world_size > 1 and self.ops[-1].kind != "widen":
                self._reduce_again(op.micro_batch)
            if not dropped.isdisjoint(op.after):
                op = replace(op, after=tuple(key for key in op.after if key not in dropped))
            self._add(op if op.stream == "compute" else _also(op, before))
            done.add(op.key)
        if self._schedule.world_size > 1 and planned[-1].phase != "forward":
            self._run((self._schedule.send_buffers(planned[-1].micro_batch, planned[-1].phase, 8),))

    def _over(self) -> tuple[Key, ...]:
        """What is over when a collective is launched now: all that was computed, and what was waited for since."""
        latest = next(((op.key,) for op in reversed(self.ops) if op.stream == "compute"), ())
        return (*latest, *self._waits)

    def _add(self, op: Op) -> None:
        """The op comes next: if it computes, after all that was waited for."""
        if op.stream == "compute":
            op, self._waits = _also(op, self._waits), []
        elif op.kind == "all_gather" and op.writes and (unit := self._unit_of.get(op.target)):
            self._held[self._schedule.slot[unit]] = unit
        self.ops.append(op)


def _also(op: Op, after: Sequence[Key]) -> Op:
    return replace(op, after=tuple(dict.fromkeys((*op.after, *after)))) if after else op
