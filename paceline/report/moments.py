"""A run's step moment by moment: buckets fill, collectives go round by round, and what each rank then holds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.command_line import quantities as said
from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import Round
from paceline.core.ops import Key, Op
from paceline.core.parameter_server import ParameterServer
from paceline.report.chunk_norms import ChunkNorms
from paceline.report.chunk_sums import Summed, Sums
from paceline.report.holdings import Held, Holdings
from paceline.report.program import Program

MOST_RANKS = 16
"""With more, chunks are too many to be drawn."""
_MOST = 150_000
"""Characters that say what is held, in all moments together: chunks, ranks and moments decide."""
_MOST_NAMED = 4

_DONE = {
    "all_reduce": ". Now every rank has the sums",
    "reduce_scatter": ". Now each rank has the sums of its shard, and the rest of the bucket is needed no more",
    "reduce": ". Now rank 0 has the sums",
}
"""How a reduction leaves gradients."""

_ROUNDS = {"all_reduce": "", "reduce_scatter": "", "all_gather": "", "reduce": "server", "broadcast": "server"}
"""Collectives that are shown round by round, and how they go; "" as it is chosen."""

Times = Mapping[Key, tuple[float, float]]
"""When each op of a step runs, in seconds from its first."""
Change = Callable[[], list[str]]
"""Changes what is held, and says of which buckets."""


@dataclass(frozen=True)
class Moment:
    """Something has happened.

    Attributes:
        told: What.
        at: Seconds into the step; None where that is not known.
        held: The buckets that are held otherwise than before.
        sums: Chunks that have other gradients than before, where their norms are known.
    """

    told: str
    at: float | None
    held: tuple[Held, ...]
    sums: tuple[Summed, ...] = ()

    def to_list(self) -> list[Any]:
        """JSON-ready values."""
        changes = [[h.bucket, h.filled, h.gradients, h.reduced, h.parameters] for h in self.held]
        return [self.told, None if self.at is None else round(self.at * 1e6, 1), changes, [list(s) for s in self.sums]]


def moments(
    program: Program, way: str = "ring", times: Times | None = None, norms: ChunkNorms | None = None
) -> list[Moment] | None:
    """The step of all ranks, in the order in which things happen.

    Collectives go round by round, or all rounds at once where that would be too much.

    Args:
        program: What each of them executes.
        way: How collectives from all to all go: "ring", or "tree" where there are but all-reduces.
        times: When ops run; without them, what runs beside something else comes in the order of the schedule.
        norms: Of what ranks' gradients add up to, of the last micro-batch.

    Returns:
        None if there would be too many to be put on a page.
    """
    holdings = Holdings(program.schedule, program.micro_batches)
    scripts = (_Script(program, holdings, way, by_round) for by_round in (True, False))
    fitting = (script for script in scripts if script.length * holdings.world * holdings.chunks <= _MOST)
    if (script := next(fitting, None)) is None:
        return None
    listed = list(script.lines())
    if times is not None:
        ends = [_when(times.get(line.key), line.part) for line in listed]
        order = sorted(range(len(listed)), key=lambda i: ends[i])
    else:
        ends, order = [], list(range(len(listed)))
    begin = tuple(holdings.held(bucket.name) for bucket in holdings.buckets)
    found = [Moment("Before the step.", None if times is None else 0.0, begin)]
    sums = None if norms is None else Sums(holdings, norms)
    for i in order:
        touched = dict.fromkeys(listed[i].change())
        held = tuple(holdings.held(name) for name in touched)
        is_known = norms is not None and listed[i].key.micro_batch == program.micro_batches - 1
        summed = () if sums is None else sums.changed(touched, is_known)
        found.append(Moment(listed[i].told, ends[i] if ends else None, held, summed))
    return found


@dataclass(frozen=True)
class _Line:
    """What happens in an op, or in a part of it.

    Attributes:
        key: The op.
        part: How much of it is over then, from 0 to 1.
        told: In words.
        change: What it does.
    """

    key: Key
    part: float
    told: str
    change: Change


class _Script:
    """What the ops of a step do, in their order."""

    def __init__(self, program: Program, holdings: Holdings, way: str, by_round: bool) -> None:
        self._program, self._holdings, self._way, self._by_round = program, holdings, way, by_round
        self._schedule = program.schedule
        self._known: dict[tuple[str, int], list[tuple[Round, ...]]] = {}

    @property
    def length(self) -> int:
        """How many lines there are, about: one for each op that is told of, or for each round of a collective."""
        told = [op for op in self._program.ops if op.kind in _ROUNDS or op.kind == "copy_in"]
        return sum(len(self._rounds(op)) if op.kind in _ROUNDS and self._by_round else 1 for op in told)

    def _rounds(self, op: Op) -> list[tuple[Round, ...]]:
        """The rounds of a collective: what every rank of a group does in each."""
        size = self._schedule.position_in(op.group)[1]
        if (op.kind, size) not in self._known:
            algorithm = find_algorithm(f"{op.kind}/{_ROUNDS[op.kind] or self._way}")
            per_rank = [algorithm(place, size, self._holdings.chunks) for place in range(size)]
            self._known[op.kind, size] = list(zip(*per_rank, strict=True))
        return self._known[op.kind, size]

    def lines(self) -> Iterator[_Line]:
        """All of it."""
        count = self._program.micro_batches
        ops = self._program.ops
        last_forward = {op.micro_batch: op.key for op in ops if op.kind == "forward"}
        for op in ops:
            of = f", micro-batch {op.micro_batch + 1} of {count}" if count > 1 else ""
            if op.key == last_forward.get(op.micro_batch):
                yield _Line(op.key, 1.0, f"Forward of all units is over{of}.", list)
            elif op.kind == "copy_in":
                yield _Line(op.key, 1.0, self._filled(op, of), partial(self._holdings.copy_in, op.target))
            elif op.stream == "statistics" and op.kind == "all_reduce":
                told = f"All ranks add up the few numbers that they must agree on ({said.size(op.bytes)})."
                yield _Line(op.key, 1.0, told, list)
            elif op.kind == "update":
                yield _Line(op.key, 1.0, self._updated(), self._holdings.update)
            elif op.kind == "barrier" and op.phase == "update" and op is ops[-1]:
                told = "All ranks have updated their shards of the parameters that they share."
                yield _Line(op.key, 1.0, told, self._holdings.all_updated)
            elif op.stream == "replicate":
                groups = self._schedule.ranks_of("replicate")
                told = f"Replicas add up their shards of {op.target} ({said.size(op.bytes)}) with an all-reduce."
                yield _Line(op.key, 1.0, told, partial(self._holdings.add_replicas, op.target, groups))
            elif op.kind in _ROUNDS:
                yield from self._collective(op)

    def _filled(self, op: Op, of: str) -> str:
        buckets = [b.name for b in self._schedule.buckets_of.get(op.target, ()) if b.trainable]
        named = ", ".join(buckets[:_MOST_NAMED]) + (" and others" if len(buckets) > _MOST_NAMED else "")
        adds = " and added to what is there" if op.reads else ""
        return f"Backward of {op.target} is over, and its gradients are copied into {named}{adds}{of}."

    def _updated(self) -> str:
        if isinstance(self._schedule, ParameterServer):
            return "Rank 0 has updated the parameters."
        what = "its shard of the parameters" if self._schedule.shards > 1 else "all parameters"
        return f"Each rank has updated {what}; gradients are needed no more."

    def _collective(self, op: Op) -> Iterator[_Line]:
        rounds = self._rounds(op)
        name = f"{op.kind.replace('_', '-').capitalize()} of {op.target} ({said.size(op.bytes)})"
        done = _DONE.get(op.kind, "")
        if not self._by_round:
            told = f"{name}, {len(rounds)} round{'s' * (len(rounds) > 1)}{done}."
            yield _Line(op.key, 1.0, told, partial(self._exchange, op, range(len(rounds))))
            return
        (group, *_), chunk = self._schedule.ranks_of(op.group), op.bytes / self._holdings.chunks
        for number, each in enumerate(rounds):
            end = done if number == len(rounds) - 1 else ""
            told = f"{name}, round {number + 1} of {len(rounds)}: {_sends(each, group, chunk)}{end}."
            change = partial(self._exchange, op, range(number, number + 1))
            yield _Line(op.key, (number + 1) / len(rounds), told, change)

    def _exchange(self, op: Op, numbers: range) -> list[str]:
        """Some rounds of a collective, in all of its groups."""
        rounds = self._rounds(op)
        step = self._holdings.spread if op.kind in ("all_gather", "broadcast") else self._holdings.add
        touched = self._holdings.make_room(op.target) if numbers.start == 0 and op.kind == "all_gather" else []
        for number in numbers:
            for group in self._schedule.ranks_of(op.group):
                touched += step(op.target, group, list(rounds[number]))
        if numbers.stop == len(rounds) and op.kind in ("reduce_scatter", "all_reduce"):
            touched += self._holdings.keep_sums(op.target)
        if numbers.stop == len(rounds) and op.kind == "reduce":
            touched += self._holdings.keep_on_server(op.target)
        return touched


def _sends(rounds: tuple[Round, ...], group: list[int], chunk: float) -> str:
    """Who sends what to whom in a round, of one group of ranks."""
    sent = [(rank, transfer) for rank, round_ in zip(group, rounds, strict=True) for transfer in round_.sends]
    told = [
        f"rank {rank} sends rank {group[transfer.peer]} {_chunks(transfer.start, transfer.stop)} "
        f"({said.size(transfer.numel * chunk)})"
        for rank, transfer in sent[:_MOST_NAMED]
    ]
    more = ", and so on" if len(sent) > _MOST_NAMED else ""
    adds = any(round_.receives and round_.combine == "add" for round_ in rounds)
    return f"{', '.join(told)}{more}; who receives {'adds it up' if adds else 'keeps it'}"


def _chunks(start: int, stop: int) -> str:
    return f"chunk {start}" if stop == start + 1 else f"chunks {start} to {stop - 1}"


def _when(span: tuple[float, float] | None, part: float) -> float:
    return 0.0 if span is None else span[0] + part * (span[1] - span[0])
