"""Proves that all ranks issue the same collectives, in one order, and get through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.check.report import Fault, within, words
from paceline.core.ops import COMPUTE, PREVIOUS, Key, Op
from paceline.core.schedule import Schedule

STEPS = 2
"""Steps in a row that are checked: a third conflicts with the second just as that does with the first."""


@dataclass(frozen=True)
class Round:
    """Ops that run at once: a compute op on one rank, or a collective on all ranks of its group.

    Attributes:
        step: 0 or 1.
        positions: The op's place in its rank's list, by rank in ascending order.
    """

    step: int
    positions: Mapping[int, int]


class Sequences:
    """The ops of all ranks, as far as their order is concerned."""

    def __init__(self, schedules: Sequence[Schedule], steps: Sequence[tuple[Op, ...]], micro_batches: int) -> None:
        """Takes one schedule and its step's ops from each rank."""
        self._schedules, self._steps, self._micro_batches = schedules, steps, micro_batches
        self.faults: list[Fault] = []
        seen: dict[tuple[object, ...], int] = {}
        self.kind_of = [seen.setdefault(self._signature(rank), rank) for rank in range(len(schedules))]
        """For each rank, the first whose ops have the same names, streams, order and sizes."""

    def _signature(self, rank: int) -> tuple[object, ...]:
        # Everything that ranks must have in common, or that decides when an op starts.
        ops = tuple((op.key, op.stream, op.after, op.group, op.bytes) for op in self._steps[rank])
        return (self._schedules[rank].scale, ops)

    def before(self, key: Key, step: int) -> tuple[int, Key]:
        """The step and the name of an op that another one of `step` comes after."""
        if key.micro_batch == PREVIOUS:
            return step - 1, key._replace(micro_batch=max(self._micro_batches - 1, 0))
        return step, key

    # ---- each rank alone

    def check_names(self) -> None:
        """Finds ops that occur twice, wait for what does not come before them, or run among the wrong ranks."""
        for rank in sorted(set(self.kind_of)):
            ops, groups = self._steps[rank], self._schedules[rank].groups
            every, seen = {op.key for op in ops}, set[Key]()
            for unit in self._schedules[rank].computed_units:
                for index in range(self._micro_batches):
                    for phase in ("forward", "backward"):
                        if (key := Key(phase, unit, index, phase)) not in every:
                            self.faults.append(Fault("sequence", rank, key, f"there is no {words(key)}"))
            for op in ops:
                if op.key in seen:
                    self._add("sequence", rank, op, f"{words(op)} stands twice in a step")
                seen.add(op.key)
                for key in op.after:
                    step, wanted = self.before(key, 1)
                    if wanted not in (every if step == 0 else seen):
                        self._add(
                            "deadlock", rank, op, f"{words(op)} comes after {words(key)}, which no op before it is"
                        )
                if (op.kind in COMPUTE) != (op.stream == "compute"):
                    self._add("sequence", rank, op, f"{words(op)} is on stream {op.stream}")
                elif op.kind not in COMPUTE and groups.get(op.stream) != op.group:
                    self._add(
                        *("sequence", rank, op),
                        f"{words(op)} runs among the ranks of group {op.group!r}, but stream {op.stream} connects "
                        f"those of {groups.get(op.stream)!r}",
                    )

    # ---- all ranks together

    def rounds(self) -> Iterator[Round]:
        """Two steps of all ranks, in an order in which they can run; ends early where no rank can go on.

        Where no two conflicting ops can swap places this one order stands for all: which op is next on a stream
        never depends on which stream was faster.
        """
        if len(set(self.kind_of)) > 1:
            return self._simulated()
        return self._in_step()

    def _in_step(self) -> Iterator[Round]:
        # Ranks with equal lists, in which every op follows what it waits for, can all run them from top to bottom.
        everyone = range(len(self._schedules))
        alone = [[rank] for rank in everyone]
        groups = {group: self._schedules[0].ranks_of(group) for group in self._schedules[0].groups.values()}
        for step in range(STEPS):
            for position, op in enumerate(self._steps[0]):
                for ranks in alone if op.kind in COMPUTE else groups[op.group]:
                    yield Round(step, dict.fromkeys(ranks, position))

    def _simulated(self) -> Iterator[Round]:
        progress = [_Progress(ops, self) for ops in self._steps]
        groups = {group: self._schedules[0].ranks_of(group) for group in self._schedules[0].groups.values()}
        moved = True
        while moved:
            moved = False
            for rank, mine in enumerate(progress):
                while (found := mine.next("compute")) is not None:
                    moved = True
                    mine.complete(*found)
                    yield Round(found[0], {rank: found[1]})
            for stream, group in self._schedules[0].groups.items():
                for ranks in groups[group]:
                    heads = {rank: progress[rank].next(stream) for rank in ranks}
                    ready = {rank: head for rank, head in heads.items() if head is not None}
                    if len(ready) < len(ranks) or not self._agree(ready):
                        continue
                    moved = True
                    for rank, head in ready.items():
                        progress[rank].complete(*head)
                    step = ready[ranks[0]][0]
                    yield Round(step, {rank: position for rank, (_, position) in ready.items()})
        if not self.faults:
            self._say_who_waits(progress)

    def _agree(self, heads: Mapping[int, tuple[int, int]]) -> bool:
        """Whether what ranks of a group are about to run together is one and the same collective."""
        if self.faults:
            return False
        (first, (step, position)), *others = heads.items()
        mine = self._steps[first][position]
        for rank, (other_step, other_position) in others:
            op = self._steps[rank][other_position]
            if (step, mine.key) != (other_step, op.key):
                self._add(
                    *("sequence", rank, op),
                    f"next on stream {op.stream} is {words(op)}{within(other_step)}, but on rank {first} "
                    f"{words(mine)}{within(step)}: they would mix the two, or wait for each other forever",
                )
            elif mine.bytes != op.bytes:
                self._add(
                    *("sequence", rank, op),
                    f"{words(op)} is of {op.bytes:,} bytes, but on rank {first} of {mine.bytes:,}",
                )
            elif (mine_scale := self._schedules[first].scale) != (scale := self._schedules[rank].scale):
                self._add(
                    *("sequence", rank, op),
                    f"{words(op)} multiplies the sum by {scale:g}, but on rank {first} by {mine_scale:g}",
                )
        return not self.faults

    def _say_who_waits(self, progress: Sequence[_Progress]) -> None:
        for rank, mine in enumerate(progress):
            for stream, step, op in mine.heads():
                waits = [
                    key for key in op.after if (found := self.before(key, step))[0] >= 0 and found not in mine.done
                ]
                what = f"is never over: {words(waits[0])}" if waits else "other ranks of its group never come to it"
                if stream == "compute" and not waits:
                    what = "the step before is never over"
                self._add(
                    *("deadlock", rank, op), f"{words(op)}{within(step)} waits forever on stream {stream}, as {what}"
                )

    def _add(self, kind: str, rank: int, op: Op, message: str) -> None:
        self.faults.append(Fault(kind, rank, op.key, message))


class _Progress:
    """The position of a rank on each of its streams."""

    def __init__(self, ops: tuple[Op, ...], sequences: Sequences) -> None:
        self._ops, self._before = ops, sequences.before
        self._queues: dict[str, list[int]] = {}
        for position, op in enumerate(ops):
            self._queues.setdefault(op.stream, []).append(position)
        self._at = dict.fromkeys(self._queues, 0)
        self.done: set[tuple[int, Key]] = set()

    def next(self, stream: str) -> tuple[int, int] | None:
        """Step and place of the op that comes next on a stream, if what it waits for is over."""
        queue = self._queues.get(stream, [])
        if not queue or self._at[stream] == STEPS * len(queue):
            return None
        step, index = divmod(self._at[stream], len(queue))
        if step and self._at["compute"] < step * len(self._queues["compute"]):
            return None
        for key in self._ops[queue[index]].after:
            wanted = self._before(key, step)
            if wanted[0] >= 0 and wanted not in self.done:
                return None
        return step, queue[index]

    def complete(self, step: int, position: int) -> None:
        """An op is over."""
        op = self._ops[position]
        self.done.add((step, op.key))
        self._at[op.stream] += 1

    def heads(self) -> Iterator[tuple[str, int, Op]]:
        """Yields the next op of each stream that is not through: stream, step and op."""
        for stream, queue in self._queues.items():
            if self._at[stream] < STEPS * len(queue):
                step, index = divmod(self._at[stream], len(queue))
                yield stream, step, self._ops[queue[index]]
