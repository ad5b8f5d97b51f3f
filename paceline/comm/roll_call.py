"""Rank 0 knows where every rank is: they tell it now and then, and all at once when one of them waits in vain.

Messages are JSON. A rank says `{"place": ...}` (whereabouts.Look) as a sign of life and, with `"call": n`, in answer to
`{"call": n, "by": rank}`; then it has printed its stacks. A rank that waits in vain says `{"ask": ...}` and is told
`{"found": ...}`: those that never came, and those that give no sign of life.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from paceline.comm.authentication import SignedMessages

ANSWER_SECONDS = 2.0
"""In which a rank that is called answers: its interpreter is free now and then, whatever it computes."""
_MOST_NAMED = 8
"""Ranks that one answer tells of."""


class Asked(NamedTuple):
    """What a rank waits for in vain."""

    by: int
    number: int
    """Of the question, among the rank's own."""
    collectives: str
    """Those of one transport, or control messages: a key of `entered`."""
    entered: int
    """The number of the collective that this rank waits in."""
    group: list[int]
    """Ranks that it is of."""


class _Known(NamedTuple):
    """Where a rank was when it was last heard of."""

    place: dict[str, Any]
    time: float


class RollCall:
    """A thread that hears all ranks, this one too."""

    def __init__(self, members: Mapping[int, SignedMessages]) -> None:
        """Begins.

        Args:
            members: Connections to all ranks.
        """
        self._members = dict(members)
        self._known: dict[int, _Known] = {}
        self._calls = 0
        self._awaited: set[int] = set()
        self._deadline: float | None = None
        self._asked: list[Asked] = []
        self._selector = selectors.DefaultSelector()
        for rank, member in members.items():
            self._selector.register(member.connection, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="paceline roll call", daemon=True)
        self._thread.start()

    def close_in_child(self) -> None:
        """Closes this process's ends, as a child of it that has no thread of them."""
        for member in self._members.values():
            member.connection.close()

    def _run(self) -> None:
        # Rank 0 leaves the job: nobody asks any more.
        while 0 in self._members:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(left):
                self._hear(key.data)
            if self._deadline is not None and (not self._awaited or time.monotonic() >= self._deadline):
                self._conclude()
        for rank in list(self._members):
            self._drop(rank)
        self._selector.close()

    def _hear(self, rank: int) -> None:
        if rank not in self._members:
            return
        try:
            for message in self._members[rank].receive():
                if "ask" in message:
                    self._asked.append(Asked(rank, *message["ask"]))
                    self._call(rank)
                else:
                    self._known[rank] = _Known(message["place"], time.monotonic())
                    if message.get("call") == self._calls:
                        self._awaited.discard(rank)
                    if "call" not in message and rank and 0 in self._known:
                        # So all know of rank 0 what it knows of them.
                        self._tell(rank, {"first": self._whereabouts(0)})
        except (ConnectionError, ValueError, KeyError, TypeError):
            self._drop(rank)

    def _call(self, by: int) -> None:
        """Calls all ranks, unless they are being called."""
        if self._deadline is not None:
            return
        self._calls += 1
        self._awaited = set(self._members)
        self._deadline = time.monotonic() + ANSWER_SECONDS
        for rank in list(self._members):
            self._tell(rank, {"call": self._calls, "by": by})

    def _conclude(self) -> None:
        """Tells those who asked."""
        silent = sorted(self._awaited)
        self._deadline, asked, self._asked = None, self._asked, []
        if silent:
            for rank in self._members.keys() - self._awaited:
                self._tell(rank, {"shake": silent})
        for question in asked:
            self._tell(question.by, {"found": question.number, "ranks": self._find(question, silent)})

    def _find(self, question: Asked, silent: list[int]) -> list[dict[str, Any]]:
        found = []
        for rank in question.group:
            is_silent = rank in silent or rank not in self._members
            # A silent one may have gone on after it was last heard of.
            if is_silent or self._number(rank, question.collectives) < question.entered:
                found.append({"rank": rank, "silent": is_silent, **self._whereabouts(rank, is_silent)})
        return found[:_MOST_NAMED]

    def _number(self, rank: int, collectives: str) -> int:
        return int(self._known[rank].place["entered"].get(collectives, 0)) if rank in self._known else 0

    def _whereabouts(self, rank: int, is_silent: bool = False) -> dict[str, Any]:
        """Where a rank is and since when it has gone no further; of a silent one, where it was and when."""
        if rank not in self._known:
            return {}
        place, heard = self._known[rank]
        waited = time.monotonic() - heard
        return {
            "words": place["words"],
            "at": place["at"],
            "seconds": waited + (0.0 if is_silent else place["seconds"]),
        }

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        member = self._members.get(rank)
        if member is None:
            return
        try:
            member.send(message)
        except ConnectionError:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        member = self._members.pop(rank, None)
        if member is not None:
            self._awaited.discard(rank)
            self._selector.unregister(member.connection)
            member.close()
