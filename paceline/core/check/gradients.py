"""Ops that move gradients and statistics, as they act on symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.core.check.facts import Region, Value
from paceline.core.check.report import words
from paceline.core.check.state import State, in_words
from paceline.core.ops import STATISTICS, Op, Span


class Gradients:
    """Checks and moves gradients: those that each op must find, and those that it leaves."""

    def __init__(self, state: State, micro_batches: int) -> None:
        """Acts on `state`, in steps of so many micro-batches."""
        self._state, self._micro_batches = state, micro_batches
        self._published = [False for _ in state.facts]

    def copy_in(self, rank: int, op: Op, step: int) -> None:
        """A unit's gradients of a micro-batch come to their buckets, or are added to what is there."""
        facts = self._state.facts[rank]
        schedule = facts.schedule
        needed = {op.target} if op.target in schedule.copied_in_backward else set(schedule.computed_units)
        if unfinished := needed - self._state.finished[rank]:
            self._state.add(
                rank, op, f"{words(op)} comes before the backward of {', '.join(sorted(unfinished))}", "gradients"
            )
            return
        if set(op.writes) != set(facts.copied.get(op.target, ())):
            self._state.add(
                rank, op, f"{words(op)} does not fill the unit's place in its buckets, and nothing else", "gradients"
            )
            return
        mine = self._state.sums.number({(step, rank, op.micro_batch): 1.0})
        partition = facts.accesses.partition
        for span, region in facts.copied[op.target].items():
            name, first, stop = partition.area(span)
            for part in range(first, stop):
                number = mine
                if span in op.reads:
                    (found,) = self._state.values(rank, (name, part, part + 1))
                    if found[:4] != region.holding("gradient", 0)[:4]:
                        self._state.explain(
                            rank, op, (name, part, part + 1), found, region.holding("gradient", mine), step
                        )
                        return
                    number = self._state.sums.add((found.content, mine))
                self._state.fill(rank, ((name, part, part + 1),), region.holding("gradient", number))

    def reduce(self, ops: Mapping[int, Op], step: int) -> None:
        """A bucket's gradients, or statistics, are summed over a group."""
        first = next(iter(ops.values()))
        if first.target == STATISTICS:
            return self._sum_statistics(ops, step)
        again = first.stream == "replicate"
        numbers: list[int] = []
        for rank, op in ops.items():
            facts = self._state.facts[rank]
            region = (facts.reduced if again else facts.gradient).get(op.target)
            if region is None:
                return self._state.add(rank, op, f"{words(op)} reduces no bucket that is trained", "gradients")
            bucket = facts.by_name[op.target]
            span = facts.buffers.reduced(bucket) if again else facts.buffers.gradient(bucket)
            # The whole is scratch for what peers send.
            if not (
                self._state.says(rank, op, op.reads[:1], span, "reduces")
                and self._state.says(rank, op, op.writes, span, "writes")
            ):
                return None
            number = self._state.first(rank, region).content
            if not self._state.expect(rank, op, region, region.holding("gradient", number), step):
                return None
            numbers.append(number)
        rank = next(iter(ops))
        if twice := self._state.sums.counted_twice(numbers):
            return self._state.add(
                rank, first, f"{words(first)} adds the contribution of {twice} more than once", "gradients"
            )
        total = self._state.sums.add(numbers, 1.0 if again else self._state.facts[rank].schedule.scale)
        for position, (rank, op) in enumerate(ops.items()):
            self._leave(rank, op, position, len(ops), total, step)
        return None

    def _leave(self, rank: int, op: Op, position: int, ranks: int, total: int, step: int) -> None:
        """Puts the result of a reduction where this rank has its share of it."""
        facts = self._state.facts[rank]
        bucket = facts.by_name[op.target]
        wanted, region = facts.buffers.reduced(bucket), facts.reduced[op.target]
        receives = op.kind != "reduce" or position == 0
        if receives:
            scatters = op.kind == "reduce_scatter"
            if scatters and not facts.is_own_shard(position, ranks):
                return self._state.add(
                    rank, op, f"{words(op)} leaves this rank another shard than its own", "gradients"
                )
            result = op.writes[-1] if op.writes else wanted
            # In place, the rank's own part of the whole is what holds the result.
            if result not in (wanted, op.reads[0] if scatters and not facts.buffers.has_reduced else wanted):
                message = f"{words(op)} leaves its result in {in_words(result)}, not {in_words(wanted)}"
                return self._state.add(rank, op, message, "gradients")
            if result in op.reads[1:]:
                before = self._state.first(rank, region)
                if not self._state.expect(rank, op, region, region.holding("gradient", before.content), step):
                    return None
                if twice := self._state.sums.counted_twice((before.content, total)):
                    return self._state.add(
                        rank, op, f"{words(op)} adds the contribution of {twice} once more", "gradients"
                    )
                total = self._state.sums.add((before.content, total))
        self._state.fill(rank, facts.accesses.partition.areas(op.writes), Value(f"what {words(op)} left behind"))
        if receives:
            self._state.fill(rank, region.areas, region.holding("gradient", total))
        return None

    def _complete(self, step: int) -> int:
        """The sum of all that a step's backwards give, as the strategy wants it."""
        ranks, schedule = len(self._state.facts), self._state.facts[0].schedule
        scale = 1 / ranks if schedule.strategy.gradients == "mean" else 1.0
        return self._state.sums.everyones(step, ranks, range(self._micro_batches), scale)

    def _finds_complete(
        self, rank: int, op: Op, step: int, others: Iterable[Span] = (), published: bool = False
    ) -> bool:
        """Whether all reduced gradients that this rank updates with are complete where an op reads them.

        Besides these and `others`, it reads nothing. Where they are `published` they are as they are updated with.
        """
        facts, total = self._state.facts[rank], self._complete(step)
        span_of = facts.buffers.published if published else facts.buffers.reduced
        regions = facts.published if published else facts.reduced
        for span in set(op.reads).difference(map(span_of, facts.schedule.updated_buckets), others):
            self._state.add(
                rank, op, f"{words(op)} reads {in_words(span)}, where this rank has nothing for it", "gradients"
            )
            return False
        for bucket in facts.schedule.updated_buckets:
            region = regions[bucket.name]
            if not self._state.says(rank, op, op.reads, span_of(bucket), "reads"):
                return False
            if not self._state.expect(rank, op, region, region.holding("gradient", total), step):
                return False
        return True

    def statistics(self, rank: int, op: Op, step: int) -> None:
        """A rank puts together what ranks agree on."""
        facts = self._state.facts[rank]
        if facts.schedule.shards > 1 and not self._finds_complete(rank, op, step):
            return
        if self._state.says(rank, op, op.writes, facts.statistics, "writes"):
            number = self._state.sums.number({(step, rank, op.micro_batch): 1.0})
            areas = facts.accesses.partition.areas(op.writes)
            self._state.fill(rank, areas, Value(STATISTICS, content=number))

    def _sum_statistics(self, ops: Mapping[int, Op], step: int) -> None:
        numbers: list[int] = []
        for rank, op in ops.items():
            region, span = self._agreed(rank), self._state.facts[rank].statistics
            number = self._state.first(rank, region).content
            if not (
                self._state.says(rank, op, op.reads, span, "reads")
                and self._state.says(rank, op, op.writes, span, "writes")
                and self._state.expect(rank, op, region, region.holding(STATISTICS, number), step)
            ):
                return
            numbers.append(number)
        total = self._state.sums.add(numbers)
        for rank in ops:
            self._state.fill(rank, self._agreed(rank).areas, Value(STATISTICS, content=total))

    def _agreed(self, rank: int) -> Region:
        facts = self._state.facts[rank]
        return Region(facts.accesses.partition.areas((facts.statistics,)), 0, 0, 1)

    def widen(self, rank: int, op: Op, step: int) -> None:
        """Complete gradients are copied to where they are as wide as what is updated."""
        facts = self._state.facts[rank]
        if self._finds_complete(rank, op, step, (facts.statistics,)):
            for bucket in facts.schedule.updated_buckets:
                if facts.buffers.published(bucket) in op.writes:
                    region = facts.published[bucket.name]
                    self._state.fill(rank, region.areas, region.holding("gradient", self._complete(step)))

    def publish(self, rank: int, op: Op, step: int) -> None:
        """Complete gradients become the parameters' own."""
        if not self._finds_complete(rank, op, step, (self._state.facts[rank].statistics,), published=True):
            return
        if len(self._state.facts) > 1:
            if not self._state.says(rank, op, op.reads, self._state.facts[rank].statistics, "reads"):
                return
            region = self._agreed(rank)
            one = range(op.micro_batch, op.micro_batch + 1)
            every = self._state.sums.everyones(step, len(self._state.facts), one)
            if not self._state.expect(rank, op, region, region.holding(STATISTICS, every), step):
                return
        self._published[rank] = True

    def consume(self, rank: int, op: Op, step: int) -> bool:
        """Whether an update finds all gradients that it is to find: published, complete, and for the first time."""
        if not self._state.facts[rank].schedule.copies_gradients or not self._micro_batches:
            return True
        if not self._published[rank]:
            self._state.add(rank, op, f"{words(op)} comes before gradients are published", "gradients")
            return False
        self._published[rank] = False
        facts = self._state.facts[rank]
        masters = map(facts.buffers.master, facts.schedule.updated_buckets)
        return self._finds_complete(rank, op, step, masters, published=True)
