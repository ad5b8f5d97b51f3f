"""Ops that move, use and update parameters, as they act on symbols."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.check.gradients import Gradients
from paceline.core.check.report import words
from paceline.core.check.sequences import STEPS
from paceline.core.check.state import State, in_words
from paceline.core.ops import Op


class Parameters:
    """Checks and moves parameters: those that each op must find, and those that it leaves."""

    def __init__(self, state: State, gradients: Gradients) -> None:
        """Acts on `state`; updates consume what `gradients` has published."""
        self._state, self._gradients = state, gradients
        self._unsharded: list[set[str]] = [set() for _ in state.facts]

    def _holds_parameters(self, rank: int, op: Op, unit: str, step: int, gathered: bool) -> None:
        facts = self._state.facts[rank]
        schedule = facts.schedule
        buckets = schedule.gathered_buckets[unit] if gathered else schedule.buckets_of.get(unit, ())
        for bucket in buckets if gathered else dict.fromkeys((*buckets, *schedule.unowned_buckets)):
            region = facts.unsharded[bucket.name]
            if not self._state.says(rank, op, op.reads, facts.buffers.unsharded(bucket), "reads"):
                return
            updates = step if bucket.trainable else 0
            if not self._state.expect(rank, op, region, region.holding("parameter", updates), step):
                return

    def unshard(self, rank: int, op: Op, step: int) -> None:
        """A unit's gathered parameters are there."""
        self._holds_parameters(rank, op, op.target, step, gathered=True)
        self._unsharded[rank].add(op.target)

    def reshard(self, rank: int, op: Op, step: int) -> None:
        """Takes note that the parameters of a unit were there until now."""
        self._holds_parameters(rank, op, op.target, step, gathered=True)
        self._unsharded[rank].discard(op.target)

    def computes(self, rank: int, op: Op, step: int) -> None:
        """A unit computes with its parameters, and with those of no unit."""
        if op.target in self._state.facts[rank].schedule.slot and op.target not in self._unsharded[rank]:
            self._state.add(rank, op, f"{words(op)} computes with parameters that nothing has unsharded")
            return
        self._holds_parameters(rank, op, op.target, step, gathered=False)
        if op.kind == "forward":
            self._state.finished[rank].clear()
        else:
            self._state.finished[rank].add(op.target)

    def all_gather(self, ops: Mapping[int, Op], step: int) -> None:
        """Shards that are updated equally often become a whole."""
        versions: dict[int, int] = {}
        for position, (rank, op) in enumerate(ops.items()):
            facts = self._state.facts[rank]
            bucket = facts.by_name.get(op.target)
            if bucket is None or not facts.is_own_shard(position, len(ops)):
                return self._state.add(rank, op, f"{words(op)} gathers no bucket of this rank")
            if not self._state.says(rank, op, op.reads, facts.buffers.shard(bucket), "reads"):
                return None
            region = facts.shard[bucket.name]
            versions[rank] = self._state.first(rank, region).content
            if not self._state.expect(rank, op, region, region.holding("parameter", versions[rank]), step):
                return None
            whole = facts.buffers.unsharded(bucket)
            for span in op.writes:
                if span.buffer != whole.buffer or not whole.start <= span.start <= span.stop <= whole.stop:
                    return self._state.add(rank, op, f"{words(op)} fills {in_words(span)}, not {in_words(whole)}")
        if len(set(versions.values())) > 1:
            late = min(versions, key=versions.__getitem__)
            return self._state.add(late, ops[late], f"{words(ops[late])} sends parameters that are yet to be updated")
        for rank, op in ops.items():
            region = self._state.facts[rank].unsharded[op.target]
            areas = self._state.facts[rank].accesses.partition.areas(op.writes)
            self._state.fill(rank, areas, region.holding("parameter", versions[rank]))
        return None

    def broadcast(self, ops: Mapping[int, Op], step: int) -> None:
        """Moves the parameters that the server has updated to the others."""
        server, *others = ops
        facts = self._state.facts[server]
        region = facts.unsharded[ops[server].target]
        span = facts.buffers.unsharded(facts.by_name[ops[server].target])
        if not self._state.says(server, ops[server], ops[server].reads, span, "reads"):
            return
        value = region.holding("parameter", self._state.first(server, region).content)
        if not self._state.expect(server, ops[server], region, value, step):
            return
        for rank in others:
            if not self._state.says(rank, ops[rank], ops[rank].writes, span, "writes"):
                return
            self._state.fill(rank, region.areas, value)

    def update(self, rank: int, op: Op, step: int) -> None:
        """Reduced gradients update this rank's share of every bucket."""
        facts = self._state.facts[rank]
        schedule, buffers = facts.schedule, facts.buffers
        if not self._gradients.consume(rank, op, step):
            return
        masters = [buffers.master(bucket) for bucket in schedule.updated_buckets]
        if sorted(op.writes) != sorted(masters) or not set(masters) <= set(op.reads):
            self._state.add(rank, op, f"{words(op)} does not update this rank's share of every bucket once")
            return
        for bucket in schedule.updated_buckets:
            region = facts.master[bucket.name]
            if not self._state.expect(rank, op, region, region.holding("parameter", step), step):
                return
            self._state.fill(rank, region.areas, region.holding("parameter", step + 1))

    def cast(self, rank: int, op: Op, step: int) -> None:
        """Updated masters are rounded to what is computed with."""
        facts = self._state.facts[rank]
        for bucket in facts.schedule.updated_buckets:
            master, shard = facts.master[bucket.name], facts.shard[bucket.name]
            if facts.buffers.shard(bucket) in op.writes:
                if not self._state.says(rank, op, op.reads, facts.buffers.master(bucket), "reads"):
                    return
                if not self._state.expect(rank, op, master, master.holding("parameter", step + 1), step):
                    return
                self._state.fill(rank, shard.areas, shard.holding("parameter", step + 1))

    def require_updated(self) -> None:
        """Every parameter that can be trained was updated in every step, everywhere."""
        for rank, facts in enumerate(self._state.facts):
            schedule = facts.schedule
            for bucket in schedule.reduced_buckets:
                regions = [facts.shard[bucket.name]]
                if schedule.updated_buckets:
                    regions.append(facts.master[bucket.name])
                if not schedule.shards_parameters:
                    regions.append(facts.unsharded[bucket.name])
                for region in regions:
                    if not self._state.faults:
                        self._state.expect(rank, None, region, region.holding("parameter", STEPS))
