"""The value of every part of every rank's buffers, and how it is read, written and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.core.check.facts import Facts, Region, Value
from paceline.core.check.report import Fault, within, words
from paceline.core.check.spans import Area
from paceline.core.check.sums import Sums
from paceline.core.ops import Op, Span

NOTHING = Value("nothing yet")


class State:
    """The buffers of all ranks.

    A part of a buffer holds parameters that were updated so many times, or a sum of gradients whose terms are the
    contributions of ranks and micro-batches.

    Attributes:
        facts: Of each rank.
        sums: What the sums in the buffers are made of.
        faults: What was found to be something else than it must be.
    """

    def __init__(self, facts: Sequence[Facts]) -> None:
        """Fills the buffers as they are before the first step."""
        self.facts = facts
        self.sums = Sums()
        self.faults: list[Fault] = []
        self._memory: list[dict[str, list[Value]]] = []
        for rank in range(len(facts)):
            self._memory.append(self._initial(rank))
        self.finished: list[set[str]] = [set() for _ in facts]
        """By rank, the units whose backward is over in the micro-batch."""

    def _initial(self, rank: int) -> dict[str, list[Value]]:
        facts = self.facts[rank]
        schedule = facts.schedule
        memory: dict[str, list[Value]] = {}
        for name, count in facts.accesses.partition.parts():
            # What the ranks of a group share is one list.
            is_own = schedule.shard_index == 0 or not facts.buffers.by_name[name].shared
            memory[name] = [NOTHING] * count if is_own else self._memory_of_group(rank)[name]
        for flat in range(len(schedule.layout.flats)):
            name = f"parameters {flat}"
            if not schedule.shards_parameters:
                memory[name][:] = [Value("parameter", flat)] * len(memory[name])
        for bucket in facts.by_name:
            for region in (facts.shard[bucket], facts.master[bucket]):
                for name, first, stop in region.areas:
                    memory[name][first:stop] = [region.holding("parameter", 0)] * (stop - first)
        return memory

    def _memory_of_group(self, rank: int) -> dict[str, list[Value]]:
        (first, *_) = next(ranks for ranks in self.facts[rank].schedule.ranks_of("shard") if rank in ranks)
        return self._memory[first]

    def add(self, rank: int, op: Op | None, message: str, kind: str = "contents") -> None:
        """A fault of a rank, at an op if there is one."""
        self.faults.append(Fault(kind, rank, op.key if op else None, message))

    def expect(self, rank: int, op: Op | None, region: Region, wanted: Value, step: int = 0) -> bool:
        """Returns whether a region holds a value, and adds a fault if not."""
        memory = self._memory[rank]
        for name, first, stop in region.areas:
            found = memory[name][first:stop]
            if found.count(wanted) < stop - first:
                part = first + next(index for index, value in enumerate(found) if value != wanted)
                self.explain(rank, op, (name, part, part + 1), memory[name][part], wanted, step)
                return False
        return True

    def explain(self, rank: int, op: Op | None, area: Area, found: Value, wanted: Value, step: int) -> None:
        """A fault: an area holds something else than is wanted."""
        span = self.facts[rank].accesses.partition.span(area)
        who = f"{words(op)}{within(step)} finds in" if op else "after two steps there is in"
        message = f"{who} [{span.start:,}, {span.stop:,}) of buffer {span.buffer!r} {self._named(rank, span, found)}"
        if found.what == wanted.what != "parameter" and found[:4] == wanted[:4]:
            message += f": {self.sums.difference(found.content, wanted.content)}"
        else:
            message += f", not {self._named(rank, span, wanted)}"
        self.add(rank, op, message, "gradients" if wanted.what == "gradient" else "contents")

    def _named(self, rank: int, span: Span, value: Value) -> str:
        if value.what not in ("parameter", "gradient"):
            return value.what
        element = (span.start - value.origin) // value.width
        buckets = self.facts[rank].schedule.layout.buckets
        name = next((b.name for b in buckets if b.flat == value.flat and b.start <= element < b.stop), "no bucket")
        if value.what == "gradient":
            return f"gradients of {name}"
        return f"parameters of {name} after {value.content} update{'' if value.content == 1 else 's'}"

    def says(self, rank: int, op: Op, spans: Sequence[Span], span: Span, verb: str) -> bool:
        """Returns whether an op says of a span that it touches it, and adds a fault if not."""
        if span in spans:
            return True
        self.add(rank, op, f"{words(op)} does not say that it {verb} {in_words(span)}")
        return False

    def first(self, rank: int, region: Region) -> Value:
        """Returns the value of the first part of a region."""
        for name, first, _ in region.areas:
            return self._memory[rank][name][first]
        return NOTHING

    def values(self, rank: int, area: Area) -> list[Value]:
        """Returns the values of the parts of an area."""
        name, first, stop = area
        return self._memory[rank][name][first:stop]

    def fill(self, rank: int, areas: Iterable[Area], value: Value) -> None:
        """Lets areas hold a value."""
        memory: Mapping[str, list[Value]] = self._memory[rank]
        for name, first, stop in areas:
            memory[name][first:stop] = [value] * (stop - first)


def in_words(span: Span) -> str:
    """A span as messages show it."""
    return f"[{span.start:,}, {span.stop:,}) of buffer {span.buffer!r}"
