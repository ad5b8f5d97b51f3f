"""Makes an algorithm ready to run on one buffer: for each of its rounds, what this rank waits for, moves and adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.comm.cpu.codecs import Codec
from paceline.comm.cpu.prepared import PreparedCollective, PreparedRound, Stage, as_bytes, copy_kernel, name_collective
from paceline.comm.cpu.residuals import Residuals
from paceline.comm.cpu.scratch import Scratch
from paceline.comm.cpu.sums import CHUNK, accumulation_dtype, sum_kernel
from paceline.comm.cpu.tcp import Message
from paceline.core.collectives.algorithms import ROOTED
from paceline.core.collectives.rounds import Algorithm, Round, Traffic, Transfer, chunk, fuses, overwrites, traffic_of

Range = tuple[int, int]


def prepare(
    name: str,
    label: str,
    algorithm: Algorithm,
    rank: int,
    world_size: int,
    own: Tensor,
    local: Mapping[int, Tensor],
    scale: float,
    out: Tensor | None,
    scratch: Scratch,
    codec: Codec | None = None,
    residuals: Residuals | None = None,
) -> PreparedCollective:
    """Makes an algorithm ready to run on a buffer.

    Args:
        name: The collective, with its algorithm.
        label: Names the op in errors.
        algorithm: What to run.
        rank: This rank.
        world_size: Number of ranks.
        own: This rank's buffer.
        local: The same buffer of each rank of this host, this one included.
        scale: Factor for sums that are complete.
        out: Where a complete sum goes, if not to its place in the buffer.
        scratch: Scratch memory.
        codec: What messages to other hosts are sent as, if not as they are.
        residuals: What rounding took off earlier messages from this buffer.
    """
    builder = _Builder(rank, own, local, scale, out, scratch, codec)
    builder.residuals = residuals
    builder.name = (name, label, scale)
    builder.chunk = chunk(rank, world_size, own.numel())
    rounds = algorithm(rank, world_size, own.numel())
    number = 0
    while number < len(rounds):
        if number + 1 < len(rounds) and builder.can_push(rounds[number], rounds[number + 1]):
            builder.push(number, rounds[number])
            number += 2
        else:
            builder.round(number, rounds[number])
            number += 1
    text, digest = name_collective(name, label, own, f" times {scale:g}" if scale != 1.0 else "")
    builder.merge()
    if name.partition("/")[0] in ROOTED:
        builder.acknowledge(rounds)
    sent, received = traffic_of(algorithm, rank, world_size, own.numel())
    traffic = Traffic(sent * own.itemsize, received * own.itemsize)
    return PreparedCollective(digest, text, builder.rounds, builder.wait_after(), traffic)


class _Builder:
    def __init__(
        self,
        rank: int,
        own: Tensor,
        local: Mapping[int, Tensor],
        scale: float,
        out: Tensor | None,
        scratch: Scratch,
        codec: Codec | None,
    ) -> None:
        self._rank, self._own, self._local, self._scale, self._out, self._scratch = (
            rank,
            own,
            local,
            scale,
            out,
            scratch,
        )
        self._codec = codec
        self._messages = 0
        self._wide = accumulation_dtype(own.dtype)
        self.chunk: Range = (0, 0)
        self.residuals: Residuals | None = None
        self.name: tuple[str, str, float] = ("", "", 1.0)
        self.rounds: list[PreparedRound] = []
        self._read: list[tuple[int, int, Range]] = []
        """(peer, stage, range): what peers read of this rank's buffer, until which stage of theirs."""

    def wait_after(self) -> tuple[Stage, ...]:
        """The stages at which all have read everything."""
        return _latest((peer, stage) for peer, stage, _ in self._read)

    # ---- two rounds of an all-reduce inside a host, as one

    def can_push(self, first: Round, second: Round) -> bool:
        """Whether sums can be written straight to the peers, which would else wait for them and read them."""
        return self._out is None and len(self._local) > 1 and fuses(first, second, self._local.keys() - {self._rank})

    def push(self, number: int, round_: Round) -> None:
        """Sums this rank's range and writes it to every buffer, each piece while it is in the core's cache."""
        peers = tuple(transfer.peer for transfer in round_.receives)
        start, stop = round_.receives[0].start, round_.receives[0].stop
        summands = [self._local[rank][start:stop] for rank in sorted(self._local)]
        copies = [self._local[peer][start:stop] for peer in peers]
        scratch = self._scratch.take("sum", min(CHUNK, stop - start), self._wide)
        kernel = sum_kernel(self._own[start:stop], summands, scratch, self._scale, copies)
        prepared = PreparedRound(_start(number), True, (), peers, [kernel], publishes_end=True)
        self.rounds.append(prepared)
        self._read += [(peer, prepared.end, (0, self._own.numel())) for peer in peers]

    # ---- any round

    def round(self, number: int, round_: Round) -> None:
        """Adds any other round."""
        receives = [transfer for transfer in round_.receives if transfer.numel]
        sends = [transfer for transfer in round_.sends if transfer.numel]
        writes = {(transfer.start, transfer.stop) for transfer in receives}
        before = _latest((peer, stage) for peer, stage, span in self._read if _overlaps(span, writes))
        readers = tuple(dict.fromkeys(transfer.peer for transfer in sends if transfer.peer in self._local))
        sources = tuple(dict.fromkeys(transfer.peer for transfer in receives if transfer.peer in self._local))
        starts = bool(readers) or number == 0
        prepared = PreparedRound(_start(number), starts, before, sources, [], readers=readers)
        prepared.publishes_end = bool(sources)
        # What peers read in this round must stay until they have it.
        apart = overwrites(round_)
        self._messages = 0
        messages: dict[Range, memoryview] = {}
        for transfer in sends:
            if transfer.peer not in self._local:
                span = transfer.start, transfer.stop
                if span not in messages:
                    # What all get is what this rank goes on with, too.
                    messages[span] = self._message(prepared, self._own[slice(*span)], round_.combine == "replace")
                prepared.sends.append((transfer.peer, messages[span]))
        if round_.combine == "add":
            self._add(prepared, receives, round_.complete, apart)
        else:
            self._replace(prepared, receives, round_.transposed, apart)
        self._read += [(peer, prepared.end, (start, stop)) for peer, start, stop in sends if peer in self._local]
        self.rounds.append(prepared)

    def _replace(self, prepared: PreparedRound, receives: Sequence[Transfer], transposed: bool, apart: bool) -> None:
        offset = 0
        total = sum(transfer.numel for transfer in receives)
        spare = self._scratch.take("apart", total, self._own.dtype) if apart else None
        for transfer in receives:
            source = self.chunk if transposed else (transfer.start, transfer.stop)
            final = self._own[transfer.start : transfer.stop]
            target = final
            if spare is not None:
                target = spare[offset : offset + final.numel()]
                prepared.write_back.append(copy_kernel(final, target))
                offset += final.numel()
            if transfer.peer in self._local:
                prepared.kernels.append(copy_kernel(target, self._local[transfer.peer][slice(*source)]))
            else:
                self._receive(prepared, transfer.peer, target)

    def _add(self, prepared: PreparedRound, receives: Sequence[Transfer], complete: bool, apart: bool) -> None:
        spans: dict[Range, list[Transfer]] = {}
        for transfer in receives:
            spans.setdefault((transfer.start, transfer.stop), []).append(transfer)
        remote = sum(transfer.numel for transfer in receives if transfer.peer not in self._local)
        arrived = self._scratch.take("arrived", remote, self._own.dtype)
        spare = self._scratch.take("apart", sum(b - a for a, b in spans), self._own.dtype) if apart else None
        taken = offset = 0
        scale = self._scale if complete else 1.0
        for (start, stop), transfers in spans.items():
            size = stop - start
            final = self._own[start:stop]
            tensors = {self._rank: final}
            for transfer in transfers:
                if transfer.peer in self._local:
                    tensors[transfer.peer] = self._local[transfer.peer][start:stop]
                else:
                    tensors[transfer.peer] = arrived[taken : taken + size]
                    self._receive(prepared, transfer.peer, tensors[transfer.peer])
                    taken += size
            target = self._out if complete and self._out is not None else final
            if spare is not None and target is final:
                target = spare[offset : offset + size]
                prepared.write_back.append(copy_kernel(final, target))
                offset += size
            ordered = [tensors[rank] for rank in sorted(tensors)]
            scratch = self._scratch.take("sum", min(CHUNK, size), self._wide)
            prepared.kernels.append(sum_kernel(target, ordered, scratch, scale))

    def _message(self, prepared: PreparedRound, source: Tensor, keeps: bool) -> memoryview:
        """The bytes of a message, which the round puts together if they are not the source's own."""
        if self._codec is None:
            return as_bytes(source)
        data = self._data(source.numel())
        assert self.residuals is not None
        residual = self.residuals.of(*self.name, prepared.start, source, self._codec)
        prepared.encode.append(self._codec.encode_kernel(source, data, source if keeps else None, residual))
        return as_bytes(data)

    def _receive(self, prepared: PreparedRound, peer: int, target: Tensor) -> None:
        """Adds the receipt of a message."""
        if self._codec is None:
            prepared.receives.append((peer, as_bytes(target)))
            return
        data = self._data(target.numel())
        prepared.receives.append((peer, as_bytes(data)))
        prepared.kernels.append(self._codec.decode_kernel(data, target))

    def _data(self, numel: int) -> Tensor:
        """Scratch for one more encoded message of a round."""
        assert self._codec is not None
        self._messages += 1
        return self._scratch.take(f"message {self._messages}", self._codec.size(numel), torch.uint8)

    def acknowledge(self, rounds: Sequence[Round]) -> None:
        """Lets ranks of other hosts answer what they received.

        A rank that only sends would not notice that they run something else.
        """
        prepared = PreparedRound(_start(len(rounds)), False, (), (), [])
        prepared.sends = self._empty(transfer.peer for round_ in rounds for transfer in round_.receives)
        prepared.receives = self._empty(transfer.peer for round_ in rounds for transfer in round_.sends)
        self.rounds.append(prepared)

    def _empty(self, peers: Iterable[int]) -> list[Message]:
        """A message without content for each of the peers on other hosts."""
        return [(peer, memoryview(b"")) for peer in dict.fromkeys(peers) if peer not in self._local]

    def merge(self) -> None:
        """Leaves out what the next round's beginning tells as well, which follows at once."""
        for prepared, after in pairwise(self.rounds):
            if after.publishes_start and not prepared.write_back:
                prepared.publishes_end = False


def _start(number: int) -> int:
    """The stage at which a round starts; the next one is its end."""
    return 2 * number + 1


def _overlaps(span: Range, others: set[Range]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


def _latest(stages: Iterable[tuple[int, int]]) -> tuple[Stage, ...]:
    latest: dict[int, int] = {}
    for peer, stage in stages:
        latest[peer] = max(stage, latest.get(peer, 0))
    return tuple(latest.items())
