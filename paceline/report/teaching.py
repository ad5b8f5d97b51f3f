"""One step of gradient descent on two ranks in numbers: a schedule executed op by op, a collective round by round.

Each rank has one item and gradients are summed, so that the step is what one process does that adds both items' up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.build_layout import build_layout
from paceline.core.build_schedule import build_schedule
from paceline.core.collectives.algorithms import find_algorithm
from paceline.core.collectives.rounds import Round
from paceline.core.layout import ROOT, Bucket
from paceline.core.ops import Op, Span
from paceline.core.parameter_server import ParameterServer
from paceline.core.strategy import SYSTEMS, Strategy
from paceline.report.small_model import ITEMS, NAMES, RATE, SPECS, Content, SmallModel, Values

WAYS: dict[str, tuple[Strategy, str]] = {
    "zero 0, a ring": (Strategy(), "ring"),
    "zero 0, a tree": (Strategy(), "tree"),
    "each parameter by itself, a ring": (SYSTEMS["manual"], "ring"),
    "parameter server": (SYSTEMS["parameter server"], "server"),
    "zero 1, a ring": (Strategy(zero=1), "ring"),
    "zero 2, a ring": (Strategy(zero=2), "ring"),
    "zero 3, a ring": (Strategy(zero=3), "ring"),
}
"""Of each that is shown: its strategy, and how its collectives go."""


@dataclass(frozen=True)
class Frame:
    """What every rank holds at a moment.

    Attributes:
        told: What has just happened.
        held: Of each rank, by what it is, the values.
        moved: From which rank to which went which of w1, w2 and b.
    """

    told: str
    held: tuple[dict[str, Values], ...]
    moved: tuple[tuple[int, int, tuple[str, ...]], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"told": self.told, "held": list(self.held), "moved": self.moved}


def frames(strategy: Strategy, way: str) -> list[Frame]:
    """The step, moment by moment.

    Args:
        strategy: How the ranks share the model.
        way: How collectives go: "ring", "tree" or "server".
    """
    summing = replace(strategy, gradients="sum")
    layout = build_layout(SPECS, (ROOT,), summing, len(ITEMS))
    ranks = (build_schedule(layout, summing, len(ITEMS), rank, ()) for rank in range(len(ITEMS)))
    return list(_Step([SmallModel(schedule) for schedule in ranks], way).run())


class _Step:
    """Ranks that do the same ops at the same time."""

    def __init__(self, ranks: list[SmallModel], way: str) -> None:
        self._ranks, self._way = ranks, way
        self._bucket = {bucket.name: bucket for bucket in ranks[0].schedule.layout.buckets}

    def run(self) -> Iterator[Frame]:
        """Does the step."""
        what = "its shard of the parameters" if self._ranks[0].schedule.shards_parameters else "all parameters"
        yield self._frame(f"Before the step each rank holds {what}")
        for op in self._ranks[0].schedule.step(1):
            yield from self._do(op)

    def _frame(self, told: str, moved: tuple[tuple[int, int, tuple[str, ...]], ...] = ()) -> Frame:
        return Frame(f"{told}.", tuple(rank.held() for rank in self._ranks), moved)

    def _do(self, op: Op) -> Iterator[Frame]:
        if op.stream == "statistics" or op.kind in ("statistics", "publish"):
            return
        if op.kind == "forward":
            told = [
                f"rank {i}: y = {y:.4g}, loss {loss:.6g}"
                for i, (y, loss) in enumerate(r.compute() for r in self._ranks)
            ]
            yield self._frame(f"Forward, each rank with its own item. {'; '.join(told)}")
        elif op.kind == "backward":
            told = [f"rank {i}: {_listed(rank.own_gradients)}" for i, rank in enumerate(self._ranks)]
            yield self._frame(f"Backward gives each rank the gradients of its own item. {'; '.join(told)}")
        elif op.kind == "copy_in":
            self._copy_in()
            yield self._frame("The gradients are copied into their buckets")
        elif op.kind in ("reduce_scatter", "all_reduce", "reduce"):
            yield from self._reduce(op)
        elif op.kind in ("all_gather", "broadcast"):
            yield from self._send_parameters(op)
        elif op.kind == "update":
            yield self._update()
        else:
            raise NotImplementedError(f"{op.kind}: no model of three numbers needs it")

    def _copy_in(self) -> None:
        for rank in self._ranks:
            for bucket in self._bucket.values():
                values: Content = [0.0] * bucket.numel
                for name, place in rank.places(bucket).items():
                    values[place] = rank.own_gradients[NAMES.index(name)]
                rank.write(rank.buffers.gradient(bucket), values)

    # ---- collectives

    def _reduce(self, op: Op) -> Iterator[Frame]:
        bucket = self._bucket[op.target]
        yield from self._rounds(op, bucket, lambda rank: rank.buffers.gradient(bucket))
        for rank in self._ranks:
            whole, reduced = rank.buffers.gradient(bucket), rank.buffers.reduced(bucket)
            if op.kind == "reduce" and rank.schedule.rank:
                rank.forget(whole)
            elif op.kind == "reduce_scatter":
                own = rank.read(rank.buffers.own_gradient(bucket))
                rank.forget(whole)
                rank.write(reduced, own)
        if op.kind != "all_reduce":
            keeps = "each rank keeps the sums of its shard" if op.kind == "reduce_scatter" else "rank 0 has the sums"
            yield self._frame(f"Now {keeps}; the rest of the bucket means nothing any more")

    def _send_parameters(self, op: Op) -> Iterator[Frame]:
        bucket = self._bucket[op.target]
        if op.kind == "all_gather":
            for rank in self._ranks:
                whole, own = rank.buffers.unsharded(bucket), rank.read(rank.buffers.shard(bucket))
                first = whole.start + rank.schedule.shard_index * len(own)
                rank.write(Span(whole.buffer, first, first + len(own)), own)
        yield from self._rounds(op, bucket, lambda rank: rank.buffers.unsharded(bucket))

    def _rounds(self, op: Op, bucket: Bucket, span: Callable[[SmallModel], Span]) -> Iterator[Frame]:
        """A collective over a part of each rank's memory, a frame for each round in which something is sent."""
        algorithm = find_algorithm(f"{op.kind}/{self._way}")
        per_rank = [algorithm(rank.schedule.rank, len(self._ranks), bucket.numel) for rank in self._ranks]
        for number, rounds in enumerate(zip(*per_rank, strict=True), start=1):
            self._exchange(rounds, [span(rank) for rank in self._ranks])
            moved = self._moved(rounds, bucket)
            told = "; ".join(f"rank {a} sends rank {b} {', '.join(names) or 'padding'}" for a, b, names in moved)
            what = "adds it up" if any(round_.combine == "add" and round_.receives for round_ in rounds) else "keeps it"
            yield self._frame(
                f"{op.kind.replace('_', '-').capitalize()} of {op.target}, round {number} of {len(per_rank[0])}: "
                f"{told}, and who receives {what}",
                moved,
            )

    def _exchange(self, rounds: tuple[Round, ...], spans: list[Span]) -> None:
        before = [rank.read(span) for rank, span in zip(self._ranks, spans, strict=True)]
        for rank, round_, span, own in zip(self._ranks, rounds, spans, before, strict=True):
            after = list(own)
            for transfer in round_.receives:
                for index in range(transfer.start, transfer.stop):
                    came, had = before[transfer.peer][index], after[index]
                    assert came is not None
                    after[index] = came + had if round_.combine == "add" and had is not None else came
            rank.write(span, after)

    def _moved(self, rounds: tuple[Round, ...], bucket: Bucket) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        places = self._ranks[0].places(bucket)
        return tuple(
            (rank, sent.peer, tuple(name for name, place in places.items() if sent.start <= place < sent.stop))
            for rank, round_ in enumerate(rounds)
            for sent in round_.sends
        )

    # ---- the update

    def _update(self) -> Frame:
        """Plain gradient descent of each rank's share."""
        for rank in self._ranks:
            for bucket in rank.schedule.updated_buckets:
                share = rank.buffers.master(bucket)
                pairs = zip(rank.read(share), rank.read(rank.buffers.reduced(bucket)), strict=True)
                rank.write(share, [None if v is None or g is None else v - RATE * g for v, g in pairs])
            for bucket in self._bucket.values():
                rank.forget(rank.buffers.gradient(bucket))
                rank.forget(rank.buffers.reduced(bucket))
                if rank.schedule.shards_parameters:
                    rank.forget(rank.buffers.unsharded(bucket))
        schedule = self._ranks[0].schedule
        whose = "its shard of the parameters" if schedule.shards > 1 else "all parameters"
        who = "Rank 0" if isinstance(schedule, ParameterServer) else "Each rank"
        return self._frame(f"{who} updates {whose}: {RATE:g} times the sums are taken off")


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in zip(NAMES, values, strict=True))
