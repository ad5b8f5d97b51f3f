"""The controller's part of `paceline bench comm`: systems take turns, round by round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.comm.calls import count_early
from paceline.bench.comm.group import Group, GroupError

TURN_SECONDS = 0.02
FEWEST, MOST = 5, 200
"""Repeats of a collective in one turn."""


@dataclass
class System:
    """One algorithm of one library, and the group that runs it."""

    group: Group
    library: str
    algorithm: str

    @property
    def label(self) -> str:
        """Library and algorithm."""
        return f"{self.library} {self.algorithm.removeprefix('*')}"


@dataclass
class Timing:
    """What one system took for one collective over one buffer."""

    system: System
    wrong: int
    """Wrong elements of all ranks' results; of a barrier, how often a rank left it before all had come."""
    repeats: int
    seconds: list[float] = field(default_factory=list)
    """Of each round: time of one run on the slowest rank."""


PEERS = ("own", "*in place", "*separate buffers", "copy")
"""Algorithms that are not ours to choose."""


def systems_for(op: str, groups: Sequence[Group], algorithms: Sequence[str]) -> list[System]:
    """Copying and every system that has a collective; of our algorithms those in `algorithms`, or all.

    A barrier moves nothing that could be copied.
    """
    return [
        System(group, library, algorithm)
        for group in groups
        for library, offered in group.offered.items()
        for algorithm in (*(offered.get("copy", ()) if op != "barrier" else ()), *offered.get(op, ()))
        if not algorithms or algorithm in algorithms or algorithm in PEERS
    ]


def measure(
    op: str,
    numel: int,
    systems: Sequence[System],
    rounds: int,
    failures: dict[str, str],
    report: Callable[[str], None],
) -> list[Timing]:
    """Checks and times systems on one collective over one size of buffer.

    Args:
        op: Which collective.
        numel: Elements; none of a barrier.
        systems: They take turns, in each round beginning with another.
        rounds: How many turns each gets.
        failures: Gets the reason for each that could not. A group that failed is closed, and its systems are left
            out from then on.
        report: Told what is being done.

    Returns:
        Timings of those that could.
    """
    timings = []
    for system in systems:
        report(f"checking {system.label}")
        # The copy stands for every collective; it is measured as one of its own.
        request = {"op": "copy" if system.algorithm == "copy" else op, "numel": numel}
        answers = _ask(system, request, failures, f"{op} over {system.label}")
        if answers is not None:
            slowest = max(answer["seconds"] for answer in answers)
            timings.append(Timing(system, _wrong(answers), repeats(slowest)))
    for number in range(rounds):
        report(f"round {number + 1} of {rounds}")
        first = number % max(len(timings), 1)
        for timing in timings[first:] + timings[:first]:
            answers = _ask(timing.system, {"repeats": timing.repeats}, failures, f"{op} over {timing.system.label}")
            if answers is not None:
                timing.seconds.append(max(answer["seconds"] for answer in answers))
    return [timing for timing in timings if len(timing.seconds) == rounds]


def _wrong(answers: Sequence[dict[str, Any]]) -> int:
    if "came" in answers[0]:
        return count_early((answer["came"] for answer in answers), (answer["left"] for answer in answers))
    return int(sum(answer["wrong"] for answer in answers))


def repeats(seconds: float) -> int:
    """How often a collective that takes so long is run in one turn."""
    return min(max(math.ceil(TURN_SECONDS / seconds), FEWEST), MOST)


def _ask(
    system: System, request: dict[str, object], failures: dict[str, str], what: str
) -> list[dict[str, Any]] | None:
    """The ranks' answers, or None where one failed."""
    if system.group.closed:
        return None
    try:
        answers = system.group.ask({"library": system.library, "algorithm": system.algorithm, **request})
    except GroupError as error:
        failures[what] = f"{error}; everything else in its processes is left out from here"
        system.group.close()
        return None
    errors = [str(answer["error"]) for answer in answers if "error" in answer]
    if errors:
        failures[what] = errors[0]
        return None
    return answers
