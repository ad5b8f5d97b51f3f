"""The engine on a GPU's streams that are made up, whose vector clocks tell what nothing keeps apart.

Ops run one after another here, in the order in which a host enqueues them, so every number is right. But two that touch
the same memory, one of which writes, are in order on a GPU only if a wait says so. Which memory an op touches, the
schedule says. A communicator is memory, too: NCCL wants its collectives one after another. To give a buffer back is to
write it: whoever gets it computes on the stream that it was allocated for.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from paceline.buffers.memory import Tensors
from paceline.buffers.parameters import Parameters
from paceline.comm.gpu_streams import CudaClock, CudaStream
from paceline.core.buffers import BufferKind, Buffers
from paceline.core.collectives.rounds import Traffic
from paceline.core.layout import Bucket
from paceline.core.ops import COMPUTE, Key, Op, Span
from paceline.engine.program import Program
from paceline.executor.collectives import Collectives
from paceline.executor.executor import Executor
from tests.comm.fake_cuda import DEVICE, FakeCuda, fake_cuda
from tests.engine.as_on_gpus import as_on_gpus

_REMEMBERED = 300


class Access(NamedTuple):
    """An op that touched a span of a buffer."""

    op: str
    span: Span
    writes: bool
    stream: int
    clock: Counter[int]

    def before(self, other: Access) -> bool:
        """Whether a wait, or that both are on one stream, makes this one come first."""
        return other.clock[self.stream] >= self.clock[self.stream]


class Watch:
    """What ops touched, and which pairs nothing keeps apart.

    Attributes:
        cuda: The device.
        races: Pairs of ops, in words.
        pairs: How many pairs on the same memory there were.
        writes_besides: What the next op writes that the schedule does not know.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.races, self.pairs = cuda, set[str](), 0
        self.writes_besides: tuple[Span, ...] = ()
        self._accesses: list[Access] = []

    def touch(self, op: Op) -> None:
        """An op touches its memory, on the current stream."""
        if op.kind in ("unshard", "reshard"):
            # The host's alone: parameters become views of the memory, or no longer are.
            return
        own = () if op.kind in COMPUTE else (Span(f"communicator {op.stream}", 0, 1),)
        self._touch(f"{op.kind} of {op.target}, {op.phase}", op.reads, (*op.writes, *own, *self.writes_besides))

    def meet(self, stream: str, purpose: str) -> None:
        """Ranks communicate outside of the schedule, on the current stream."""
        self._touch(purpose, (), (Span(f"communicator {stream}", 0, 1),))

    def use(self, what: str, span: Span) -> None:
        """Something that is no op reads memory, on the current stream."""
        self._touch(what, (span,), ())

    def give_back(self, buffer: str) -> None:
        """A buffer's memory is somebody else's from now on."""
        self._touch("memory given back", (), (Span(buffer, 0, sys.maxsize),))

    def _touch(self, name: str, read: Sequence[Span], written: Sequence[Span]) -> None:
        stream = self.cuda.current
        clock = stream.advance()
        for writes, spans in ((False, read), (True, written)):
            for span in spans:
                new = Access(name, span, writes, stream.cuda_stream, clock)
                for old in self._accesses:
                    if (old.writes or writes) and old.span.overlaps(span):
                        self.pairs += 1
                        if not old.before(new):
                            self.races.add(f"{old.op} | {name}")
                self._accesses.append(new)
        del self._accesses[: -2 * _REMEMBERED]


@contextmanager
def ordered_streams() -> Iterator[Watch]:
    """Inside, models that are made parallel run on such streams."""
    with as_on_gpus(), fake_cuda() as cuda:
        watch, work = Watch(cuda), Program.work
        begin, end, meet, run_ops = Executor.begin, Executor.end, Collectives._meet, Executor.run
        pin, unpin = Parameters.pin, Parameters.unpin
        allocate = Tensors.allocate
        clock = CudaClock(DEVICE)

        def watched_work(program: Program, op: Op) -> Callable[[], Traffic]:
            run = work(program, op)

            def watched() -> Traffic:
                watch.touch(op)
                return run()

            return watched

        def watched_run(executor: Executor, ops: Sequence[Op], run: Callable[[], Traffic] | None = None) -> None:
            def watched() -> Traffic:
                assert run is not None
                watch.touch(ops[0])
                return run()

            run_ops(executor, ops, None if run is None else watched)

        def watched_pin(parameters: Parameters, index: int, gather: Callable[[Bucket, Tensor], None]) -> None:
            """What a bucket is gathered into out of turn is memory of its own, and then computed with."""
            memory = Span(f"pinned {parameters.flat.bucket_of[index].name}", 0, 1)

            def gathered(bucket: Bucket, into: Tensor) -> None:
                watch.writes_besides = (memory,)
                try:
                    gather(bucket, into)
                finally:
                    watch.writes_besides = ()

            pin(parameters, index, gathered)
            watch.use("a parameter outside of its unit", memory)

        def watched_unpin(parameters: Parameters) -> None:
            for name in parameters.pinned.copies:
                watch.give_back(f"pinned {name}")
            unpin(parameters)

        def watched_begin(executor: Executor, key: Key) -> None:
            begin(executor, key)
            watch.touch(executor._progress.get(key))

        def watched_end(executor: Executor) -> None:
            running: Any = executor._running
            if running is not None:
                watch.touch(running.op)
            end(executor)

        def watched_meet(collectives: Collectives, stream: str, kind: str, *args: Any, **named: Any) -> None:
            watch.meet(stream, f"{kind} outside of the schedule")
            meet(collectives, stream, kind, *args, **named)

        def watched_allocate(tensors: Tensors, buffers: Buffers, *kinds: BufferKind) -> None:
            for name in [name for name, kind in tensors._kinds.items() if kind in kinds]:
                watch.give_back(name)
            allocate(tensors, buffers, *kinds)

        with (
            patch("paceline.comm.connect.CudaStream", CudaStream),
            patch("paceline.engine.program.open_clock", lambda world: clock),
            patch.object(Program, "work", watched_work),
            patch.object(Executor, "begin", watched_begin),
            patch.object(Executor, "end", watched_end),
            patch.object(Executor, "run", watched_run),
            patch.object(Parameters, "pin", watched_pin),
            patch.object(Parameters, "unpin", watched_unpin),
            patch.object(Collectives, "_meet", watched_meet),
            patch.object(Tensors, "allocate", watched_allocate),
        ):
            yield watch
            # What is collected later gives its streams up, of which there are none outside.
            gc.collect()
