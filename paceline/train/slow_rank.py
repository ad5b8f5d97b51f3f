"""The rank that the others stand still for, told while a run goes on: from when each came to each collective."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Event
from paceline.core.ops import COMPUTE
from paceline.core.placement import Placement
from paceline.core.straggler import Costly, costliest

STEPS = 20
"""Steps that are looked at, at most."""
_MOST, _LEAST_STEPS, _MOST_STEPS = 512, 3, 16
"""Collectives that a rank tells of at once, about; and steps, at least and at most."""
_NOISE = 0.0005
"""Seconds by which a rank of one clock may seem to leave too soon: a GPU's times are read to about that."""
_MICROSECOND = 1e-6


class SlowRank:
    """Which rank cost the others most in the latest steps."""

    def __init__(self, placement: Placement) -> None:
        """Knows of no step.

        Args:
            placement: Says which ranks meet on which stream.
        """
        self._groups = {str(stream): placement.ranks_of(group) for stream, group in placement.groups.items()}
        self._costs: deque[Mapping[int, float]] = deque(maxlen=STEPS)
        self._streams: dict[int, list[str]] = {}
        self._has_warmed_up = False

    def account(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """What a rank tells of its latest steps, ready for JSON.

        Args:
            events: Of this rank since the last time.

        Returns:
            Of each step its number, a checksum of what its collectives were, when the first began in seconds, and of
            each when it began after that, how long it took, and how long computing stood still, in microseconds.
        """
        steps: dict[int, list[Event]] = {}
        for event in events:
            if event.kind not in COMPUTE and event.planned and event.stream in self._groups:
                steps.setdefault(event.step, []).append(event)
        if not self._has_warmed_up:
            # The first step imports, compiles and makes connections.
            steps.pop(min(steps, default=0), None)
            self._has_warmed_up = True
        most = max(map(len, steps.values()), default=1)
        latest = sorted(steps)[-min(_MOST_STEPS, max(_LEAST_STEPS, _MOST // most)) :]
        self._streams = {}
        return [self._told(step, sorted(steps[step], key=_name)) for step in latest]

    def _told(self, step: int, events: Sequence[Event]) -> dict[str, Any]:
        self._streams[step] = [event.stream for event in events]
        began = min(event.start for event in events)
        times = [(event.start - began, event.seconds, event.exposed) for event in events]
        return {
            "step": step,
            "of": zlib.crc32(repr([_name(event) for event in events]).encode()),
            "began": began,
            "times": [round(time / _MICROSECOND) for each in times for time in each],
        }

    def found(self, accounts: Sequence[Sequence[Mapping[str, Any]]], seconds: float) -> Costly | None:
        """The rank that stands out; None where none does.

        Args:
            accounts: Of every rank.
            seconds: Length of a step.
        """
        by_rank = [{told["step"]: told for told in account} for account in accounts]
        for step, streams in self._streams.items():
            told = [each[step] for each in by_rank if step in each]
            if len(told) == len(by_rank) and len({each["of"] for each in told}) == 1:
                times = np.array([each["times"] for each in told], np.float64).reshape(len(told), -1, 3) * _MICROSECOND
                times[:, :, 0] += np.array([each["began"] for each in told])[:, None]
                self._costs.append(self._cost(times, np.array(streams)))
        return costliest(self._costs, seconds) if self._costs else None

    def _cost(self, times: NDArray[np.float64], streams: NDArray[np.str_]) -> dict[int, float]:
        cost = np.zeros(len(times))
        for stream, groups in self._groups.items():
            for group in groups:
                met = times[group][:, streams == stream]
                if len(group) > 1 and met.shape[1]:
                    np.add.at(cost, *_waited_for(np.array(group), met))
        return dict(enumerate((cost / max(1, len(times) - 1)).tolist()))


def _waited_for(group: NDArray[np.int64], met: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Who came last to each collective of a group, and seconds that the others computed nothing until it had come.

    Args:
        group: Ranks, shape (n,).
        met: When each began, how long it took and stood still, shape (n, collectives, 3).
    """
    start, end = met[:, :, 0], met[:, :, 0] + met[:, :, 1]
    # Nobody leaves before all have come: whose clock says so is another host's, and ends are about the same time.
    agrees = ((start[:1] <= end + _NOISE) & (start <= end[:1] + _NOISE)).all(1)
    ahead = np.where(agrees, 0.0, np.median(end - end[:1], 1))[:, None]
    start, end = start - ahead, end - ahead
    came = start.max(0)
    waited = np.clip(np.minimum(came, end) - np.maximum(start, end - met[:, :, 2]), 0, None)
    return group[start.argmax(0)], waited.sum(0)


def _name(event: Event) -> tuple[str, str, str, str, int]:
    return event.stream, event.phase, event.kind, event.target, event.micro_batch
