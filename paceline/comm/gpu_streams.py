"""A GPU's streams, on which collectives run beside computing, and its clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.comm.living import Living
from paceline.comm.streams import Mark, Pending
from paceline.core.collectives.rounds import Traffic
from paceline.core.errors import EngineError

_ANCHORED_SECONDS = 100.0


class CudaStream:
    """A GPU stream: collectives are enqueued behind what has been computed so far; the host never waits.

    Attributes:
        is_timed: Whether when collectives start and end can be read afterwards, which takes more than to wait for them.
    """

    is_timed = False

    def __init__(self, device: torch.device) -> None:
        """Creates a CUDA stream of high priority on `device`, so that collectives are not queued behind kernels."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        _gpu_streams.add(self)

    def submit(self, work: Callable[[], Traffic], label: str, after: Sequence[Pending] = ()) -> Pending:
        """Enqueues `work` behind everything on the current stream."""
        pending = Pending(label)
        # Of this rank's GPU, whichever one the program has made the current one since.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for other in after:
            self._stream.wait_event(other.end)
        with torch.cuda.stream(self._stream):
            if self.is_timed:
                pending.start = _record(self._stream, timed=True)
            pending.traffic = work()
            pending.end = _record(self._stream, self.is_timed)
        return pending

    def wait(self, pending: Pending) -> None:
        """Lets the current stream, not the host, wait."""
        torch.cuda.current_stream(self._device).wait_event(pending.end)

    def close(self) -> bool:
        """Waits until the GPU has finished what was submitted."""
        self._stream.synchronize()
        return True

    def abandon(self) -> None:
        """What was submitted is of no more use: the GPU, not the host, ends it before what is computed next.

        So memory that it uses may be given to somebody else.
        """
        for other in (torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)):
            other.wait_stream(self._stream)

    def is_idle(self) -> bool:
        """Whether the GPU has finished what was submitted, and what it has failed at counts as that."""
        try:
            return self._stream.query()
        except RuntimeError:
            return True


_gpu_streams: Living[CudaStream] = Living()
_LOOK_SECONDS = 0.01


def let_end(seconds: float) -> bool:
    """Lets this process's GPU end what was submitted to any stream, for so long at most; whether it has ended."""
    deadline = time.monotonic() + seconds
    while not all(stream.is_idle() for stream in _gpu_streams):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _record(stream: torch.cuda.Stream, timed: bool) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


class CudaClock:
    """Marks are CUDA events, turned into host seconds when they are read, long after the step.

    All that the engine is told of counts as computed on one stream: where a program changes streams, or autograd adds
    to gradients on another one than backward's, each part is enqueued behind the one before.
    """

    def __init__(self, device: torch.device) -> None:
        """Ties the time of a GPU, this rank's, to the host's."""
        self._device, self._latest = device, torch.cuda.current_stream(device)
        self._raw = self._latest.cuda_stream
        self.refresh()

    def refresh(self) -> None:
        """Ties them anew, which takes a synchronisation: times are fp32 milliseconds since, so they must stay short."""
        self._anchor = _record(torch.cuda.current_stream(self._device), timed=True)
        self._anchor.synchronize()
        self._anchor_seconds = time.perf_counter()

    def begin_recording(self) -> None:
        """Ties them anew where that was long ago."""
        if time.perf_counter() - self._anchor_seconds > _ANCHORED_SECONDS:
            self.refresh()

    def now(self, timed: bool = True) -> Mark:
        """A mark on the current stream, which follows what was computed before; None where nobody will read it."""
        self.follow()
        return _record(self._latest, timed=True) if timed else None

    def follow(self) -> None:
        """What is enqueued on the current stream from now on runs behind what was computed on the one before.

        Raises:
            EngineError: The current stream, another one, is being captured.
        """
        # The number alone, as this is asked for each op; Python's object takes ten times as long to make.
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw != self._raw:
            self.require_no_capture()
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._latest)
            self._latest, self._raw = current, raw

    def seconds(self, mark: Mark) -> float:
        """The time of a mark, in seconds; waits until the GPU has reached it."""
        mark.synchronize()
        return float(self._anchor_seconds + self._anchor.elapsed_time(mark) / 1e3)

    def require_no_capture(self) -> None:
        """Refuses to be captured into a CUDA graph.

        Raises:
            EngineError: The current stream is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise EngineError(
                "a CUDA graph is being captured: it would hold the buffers and events of this one step, and others "
                "use others. Run the parallel model, its backward and optimizer.step() outside of torch.cuda.graph and "
                "make_graphed_callables; to spare the host, compile the model (torch.compile)"
            )
