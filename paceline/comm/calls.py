"""A plan made ready to run on one buffer: what to wait for, what to move, what to add, step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.comm.algorithms import ROOTED
from paceline.comm.codecs import Codec
from paceline.comm.plan import Part, Plan, Round, Traffic, fuses, overwrites, shard
from paceline.comm.scratch import Room
from paceline.comm.signals import text_of
from paceline.comm.sums import CHUNK, Work, accumulation_dtype, summing
from paceline.comm.tcp import Message

Range = tuple[int, int]


@dataclass(slots=True)
class Step:
    """One round of this rank.

    Ranks of the same host read each other's buffers where they lie: `begun` says that what this rank has for the round
    lies there, `done` that it has read what it needs. Others are sent messages.
    """

    begun: int
    announces: bool
    before: tuple[tuple[int, int], ...]
    """(peer, stage): who still reads what this round overwrites, until when."""
    sources: tuple[int, ...]
    work: list[Work]
    packs: list[Work] = field(default_factory=list)
    """What puts messages together."""
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    finish: list[Work] = field(default_factory=list)
    """What overwrites what peers read in this very round."""
    readers: tuple[int, ...] = ()
    confirms: bool = False
    """Whether someone may wait for this rank's reading, and nothing else tells that it is over."""

    @property
    def done(self) -> int:
        """The stage of having read."""
        return self.begun + 1


@dataclass(slots=True)
class Call:
    """One collective on one buffer."""

    digest: int
    text: bytes
    steps: list[Step]
    last: tuple[tuple[int, int], ...]
    """(peer, stage): who may still read this rank's buffer, until when."""
    traffic: Traffic
    first: Work | None = None
    """What puts this rank's elements in place."""


def prepare(
    name: str,
    label: str,
    plan: Plan,
    rank: int,
    world_size: int,
    own: Tensor,
    near: Mapping[int, Tensor],
    scale: float,
    out: Tensor | None,
    room: Room,
    codec: Codec | None = None,
) -> Call:
    """Makes a plan ready.

    Args:
        name: The collective, with its algorithm.
        label: Names the op in errors.
        plan: What to run.
        rank: This rank.
        world_size: Number of ranks.
        own: This rank's buffer.
        near: The same buffer of each rank of this host, this one included.
        scale: Factor for sums that are complete.
        out: Where a complete sum goes, if not to its place in the buffer.
        room: Scratch memory.
        codec: What messages to other hosts are sent as, if not as they are.
    """
    builder = _Builder(rank, own, near, scale, out, room, codec)
    builder.shard = shard(rank, world_size, own.numel())
    rounds = plan(rank, world_size, own.numel())
    number = 0
    while number < len(rounds):
        if number + 1 < len(rounds) and builder.pushes(rounds[number], rounds[number + 1]):
            builder.push(number, rounds[number])
            number += 2
        else:
            builder.round(number, rounds[number])
            number += 1
    sent = sum(part.stop - part.start for turn in rounds for part in turn.sends)
    received = sum(part.stop - part.start for turn in rounds for part in turn.receives)
    words, digest = _named(name, label, own, f" times {scale:g}" if scale != 1.0 else "")
    builder.merge()
    if name.partition("/")[0] in ROOTED:
        builder.acknowledge(rounds)
    return Call(digest, words, builder.steps, builder.last(), Traffic(sent * own.itemsize, received * own.itemsize))


class _Builder:
    def __init__(
        self,
        rank: int,
        own: Tensor,
        near: Mapping[int, Tensor],
        scale: float,
        out: Tensor | None,
        room: Room,
        codec: Codec | None,
    ) -> None:
        self._rank, self._own, self._near, self._scale, self._out, self._room = rank, own, near, scale, out, room
        self._codec = codec
        self._messages = 0
        self._wide = accumulation_dtype(own.dtype)
        self.shard: Range = (0, 0)
        self.steps: list[Step] = []
        self._read: list[tuple[int, int, Range]] = []
        """(peer, stage, range): what peers read of this rank's buffer, until which stage of theirs."""

    def last(self) -> tuple[tuple[int, int], ...]:
        """When all have read everything."""
        return _latest((peer, stage) for peer, stage, _ in self._read)

    # ---- an all-reduce of neighbours, in one round

    def pushes(self, first: Round, second: Round) -> bool:
        """Whether sums can be written straight to the peers, which would else wait for them and read them."""
        return self._out is None and len(self._near) > 1 and fuses(first, second, self._near.keys() - {self._rank})

    def push(self, number: int, turn: Round) -> None:
        """Sums this rank's range and writes it to every buffer, each piece while it is in the core's cache."""
        peers = tuple(part.peer for part in turn.receives)
        start, stop = turn.receives[0].start, turn.receives[0].stop
        parts = [self._near[rank][start:stop] for rank in sorted(self._near)]
        copies = [self._near[peer][start:stop] for peer in peers]
        scratch = self._room.take("sum", CHUNK, self._wide)
        work = summing(self._own[start:stop], parts, scratch, self._scale, copies)
        begun = 2 * number + 1
        self.steps.append(Step(begun, True, (), peers, [work], confirms=True))
        self._read += [(peer, begun + 1, (0, self._own.numel())) for peer in peers]

    # ---- any round

    def round(self, number: int, turn: Round) -> None:
        """Adds the step of one round."""
        begun = 2 * number + 1
        receives = [part for part in turn.receives if part.stop > part.start]
        sends = [part for part in turn.sends if part.stop > part.start]
        writes = {(part.start, part.stop) for part in receives}
        before = _latest((peer, stage) for peer, stage, span in self._read if _meets(span, writes))
        readers = tuple(dict.fromkeys(part.peer for part in sends if part.peer in self._near))
        sources = tuple(dict.fromkeys(part.peer for part in receives if part.peer in self._near))
        step = Step(begun, bool(readers) or number == 0, before, sources, [], readers=readers, confirms=bool(sources))
        # What peers take in this round must stay until they have it.
        aside = overwrites(turn)
        self._messages = 0
        messages: dict[Range, memoryview] = {}
        for part in sends:
            if part.peer not in self._near:
                span = part.start, part.stop
                if span not in messages:
                    # What all get is what this rank goes on with, too.
                    messages[span] = self._message(step, self._own[slice(*span)], turn.combine == "replace")
                step.sends.append((part.peer, messages[span]))
        if turn.combine == "add":
            self._add(step, receives, turn.complete, aside)
        else:
            self._replace(step, receives, turn.crossed, aside)
        self._read += [(part.peer, step.done, (part.start, part.stop)) for part in sends if part.peer in self._near]
        self.steps.append(step)

    def _replace(self, step: Step, receives: Sequence[Part], crossed: bool, aside: bool) -> None:
        offset = 0
        total = sum(part.stop - part.start for part in receives)
        spare = self._room.take("aside", total, self._own.dtype) if aside else None
        for part in receives:
            source = self.shard if crossed else (part.start, part.stop)
            final = self._own[part.start : part.stop]
            target = final
            if spare is not None:
                target = spare[offset : offset + final.numel()]
                step.finish.append(copying(final, target))
                offset += final.numel()
            if part.peer in self._near:
                step.work.append(copying(target, self._near[part.peer][slice(*source)]))
            else:
                self._receive(step, part.peer, target)

    def _add(self, step: Step, receives: Sequence[Part], complete: bool, aside: bool) -> None:
        spans: dict[Range, list[Part]] = {}
        for part in receives:
            spans.setdefault((part.start, part.stop), []).append(part)
        far = sum(part.stop - part.start for part in receives if part.peer not in self._near)
        arrived = self._room.take("arrived", far, self._own.dtype)
        spare = self._room.take("aside", sum(b - a for a, b in spans), self._own.dtype) if aside else None
        taken = offset = 0
        scale = self._scale if complete else 1.0
        for (start, stop), parts in spans.items():
            size = stop - start
            final = self._own[start:stop]
            tensors = {self._rank: final}
            for part in parts:
                if part.peer in self._near:
                    tensors[part.peer] = self._near[part.peer][start:stop]
                else:
                    tensors[part.peer] = arrived[taken : taken + size]
                    self._receive(step, part.peer, tensors[part.peer])
                    taken += size
            target = self._out if complete and self._out is not None else final
            if spare is not None and target is final:
                target = spare[offset : offset + size]
                step.finish.append(copying(final, target))
                offset += size
            ordered = [tensors[rank] for rank in sorted(tensors)]
            step.work.append(summing(target, ordered, self._room.take("sum", CHUNK, self._wide), scale))

    def _message(self, step: Step, source: Tensor, keeps: bool) -> memoryview:
        """The bytes of a message, which the step puts together if they are not the source's own."""
        if self._codec is None:
            return as_bytes(source)
        data = self._data(source.numel())
        step.packs.append(self._codec.encoding(source, data, source if keeps else None))
        return as_bytes(data)

    def _receive(self, step: Step, peer: int, target: Tensor) -> None:
        """Adds the receipt of a message."""
        if self._codec is None:
            step.receives.append((peer, as_bytes(target)))
            return
        data = self._data(target.numel())
        step.receives.append((peer, as_bytes(data)))
        step.work.append(self._codec.decoding(data, target))

    def _data(self, numel: int) -> Tensor:
        """Room for one more encoded message of a round."""
        assert self._codec is not None
        self._messages += 1
        return self._room.take(f"message {self._messages}", self._codec.size(numel), torch.uint8)

    def acknowledge(self, rounds: Sequence[Round]) -> None:
        """Lets ranks of other hosts answer what they received.

        A rank that only sends would not notice that they call something else.
        """
        sends = dict.fromkeys(part.peer for turn in rounds for part in turn.receives if part.peer not in self._near)
        receives = dict.fromkeys(part.peer for turn in rounds for part in turn.sends if part.peer not in self._near)
        nothing = memoryview(b"")
        step = Step(2 * len(rounds) + 1, False, (), (), [])
        step.sends = [(peer, nothing) for peer in sends]
        step.receives = [(peer, nothing) for peer in receives]
        self.steps.append(step)

    def merge(self) -> None:
        """Leaves out what the next round's beginning tells as well, which follows at once."""
        for step, after in pairwise(self.steps):
            if after.announces and not step.finish:
                step.confirms = False


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)


def copying(target: Tensor, source: Tensor) -> Work:
    """A function that copies `source` to `target`."""

    def copy() -> None:
        target.copy_(source)

    return copy


def _meets(span: Range, others: set[Range]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


def _latest(stages: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    latest: dict[int, int] = {}
    for peer, stage in stages:
        latest[peer] = max(stage, latest.get(peer, 0))
    return tuple(latest.items())


def prepare_gather(name: str, label: str, rank: int, buffer: Tensor, shards: Mapping[int, Tensor]) -> Call:
    """Makes a direct all-gather ready whose shards lie beside the buffer, where ranks of this host read them.

    Args:
        name: The collective, with its algorithm.
        label: Names the op in errors.
        rank: This rank.
        buffer: What is filled, in any memory.
        shards: Each rank's shard, this one's included.
    """
    peers = tuple(peer for peer in shards if peer != rank)
    size = buffer.numel() // len(shards)
    work = [copying(buffer[peer * size : (peer + 1) * size], shards[peer]) for peer in (*peers, rank)]
    words, digest = _named(name, label, buffer)
    step = Step(1, True, (), peers, work, confirms=True)
    traffic = Traffic(len(peers) * size * buffer.itemsize, len(peers) * size * buffer.itemsize)
    return Call(digest, words, [step], tuple((peer, step.done) for peer in peers), traffic)


def meeting(name: str, label: str, rank: int, buffer: Tensor, near: Iterable[int], far: Iterable[int]) -> Call:
    """A call that moves nothing, for ranks to see that all are about to do the same.

    Args:
        name: The collective to come, with its algorithm.
        label: Names the op in errors.
        rank: This rank.
        buffer: What the collective is to be run on.
        near: The other ranks of this host.
        far: Those of other hosts.
    """
    words, digest = _named(f"room for {name}", label, buffer)
    step = Step(1, True, (), tuple(peer for peer in near if peer != rank), [])
    nothing = memoryview(b"")
    step.sends = step.receives = [(peer, nothing) for peer in far]
    return Call(digest, words, [step], (), Traffic(0, 0))


def _named(name: str, label: str, buffer: Tensor, more: str = "") -> tuple[bytes, int]:
    words = f"{name} {label} {buffer.numel()} {str(buffer.dtype).removeprefix('torch.')}{more}"
    return text_of(words), int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")
