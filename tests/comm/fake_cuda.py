"""A GPU's streams and events that are made up: they note what is asked of them, and its work is done at once.

Each stream has a vector clock (Lamport 1978, Mattern 1989): how far it has come itself, and how far every other one had
come that it waited for. What one stream does comes after what another did if its clock says so, however it happened to
run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """One stream, by its number; 0 is the default one.

    Attributes:
        clock: How far each stream has come that this one's next work comes after.
    """

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda_stream, self._cuda = number, cuda
        self.clock: Counter[int] = Counter()

    def advance(self) -> Counter[int]:
        """The stream does something; returns its clock then."""
        self.clock[self.cuda_stream] += 1
        return self.clock.copy()

    def wait_stream(self, other: FakeStream) -> None:
        self._wait("wait_stream", other.cuda_stream, other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self._wait("wait_event", event.stream, event.clock)

    def _wait(self, kind: str, other: int, clock: Counter[int]) -> None:
        self._cuda.waits.append((self.cuda_stream, other))
        if not self._cuda.ignores(kind, self):
            self.clock |= clock

    def synchronize(self) -> None:
        self._cuda.synchronised += 1

    def query(self) -> bool:
        return True


class FakeEvent:
    """A point on a stream."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self._cuda, self._timed, self.stream = cuda, enable_timing, -1
        cuda.events.append(enable_timing)

    def record(self, stream: FakeStream | None = None) -> None:
        on = self._cuda.current if stream is None else stream
        self.stream, self._at = on.cuda_stream, time.perf_counter()
        self.clock = on.advance()

    def synchronize(self) -> None:
        self._cuda.synchronised += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._timed and other._timed, "torch raises where an event was made without timing"
        return 1e3 * (other._at - self._at)


class FakeCuda:
    """What was asked for.

    Attributes:
        current: The current stream.
        waits: (stream, stream it waits for), in order.
        events: Of each event that was made whether it is timed.
        synchronised: How often the host waited for an event.
        is_capturing: Whether the current stream is being captured.
        ignores: Tells of a wait of a stream, by the method's name, whether it is left out.
    """

    def __init__(self) -> None:
        self.current = FakeStream(self, 0)
        self.default, self._made = self.current, 0
        self.waits: list[tuple[int, int]] = []
        self.events: list[bool] = []
        self.synchronised = 0
        self.is_capturing = False
        self.ignores: Callable[[str, FakeStream], bool] = lambda kind, stream: False

    def stream(self) -> FakeStream:
        """A new one."""
        self._made += 1
        return FakeStream(self, self._made)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Inside, `stream` is the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Inside, torch's streams and events are these."""
    cuda = FakeCuda()
    with ExitStack() as stack:
        for name, value in {
            # Without a device they are those of the one that the program made current, which need not be the rank's.
            "torch.cuda.current_stream": lambda device: cuda.current,
            "torch.cuda.default_stream": lambda device: cuda.default,
            "torch.cuda.Stream": lambda device=None, priority=0: cuda.stream(),
            "torch.cuda.stream": cuda.on,
            "torch.cuda.Event": lambda enable_timing=False: FakeEvent(cuda, enable_timing),
            "torch.cuda.is_current_stream_capturing": lambda: cuda.is_capturing,
        }.items():
            stack.enter_context(patch(name, value))
        # Only builds with CUDA have it.
        stack.enter_context(
            patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: cuda.current.cuda_stream, create=True)
        )
        yield cuda
