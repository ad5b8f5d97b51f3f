"""How long each part of going on takes, between the last step of a job and the first one of the next."""

from __future__ import annotations

import time

PARTS = {
    "noticing": "until this rank saw that another was gone, or the step was over at whose end it was asked to leave",
    "leaving": "the job",
    "place": "until the launcher had a place in the next job for each of those that are to be in it",
    "meeting": "the other ranks",
    "state": "telling each other what ranks hold, and handing it on",
    "text": "opening it",
    "model": "making it parallel, and its optimizer",
    "loading": "what others handed on",
    "opening": "the loader and the run's folder",
    "first_step": "the first step, which is no interruption as far as any takes so long",
}
"""What each is, by the name of its figure, in their order."""


class Interruption:
    """What each part of one has taken on this rank.

    Attributes:
        seconds: By part.
        is_over: Whether the next job has done a step.
    """

    def __init__(self, since: float) -> None:
        """Begins.

        Args:
            since: When the last step was done, on the host's monotonic clock.
        """
        self._latest = since
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.is_over = False

    def did(self, part: str) -> None:
        """One of `PARTS` is over; again, where the next job was lost before its first step."""
        before, self._latest = self._latest, time.monotonic()
        self.seconds[part] += self._latest - before

    def stepped(self) -> dict[str, float | int]:
        """The next job has done a step: all figures by `group/name`."""
        self.did("first_step")
        self.is_over = True
        return {f"interruption/{part}_seconds": seconds for part, seconds in self.seconds.items()}
