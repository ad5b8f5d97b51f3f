"""The transports of this process: what becomes of them all in a deadlock, in a forked child, and at the end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from paceline.comm.cpu.forked_memory import make_private
from paceline.comm.living import Living
from paceline.comm.streams import others_idle, wait_for_others
from paceline.comm.transport import explain


class _Registered(Protocol):
    identity: str

    @property
    def number(self) -> int: ...

    @property
    def under_way(self) -> str: ...

    def blocked_peers(self) -> Iterable[tuple[int, str]]: ...

    def abort(self, reason: str = "") -> None: ...

    def close_sockets(self) -> None: ...


_transports: Living[_Registered] = Living()


def register(transport: _Registered) -> None:
    """Remembers a transport for as long as it lives."""
    _transports.add(transport)


class Deadlock(NamedTuple):
    """Two ranks that wait for each other."""

    transport: _Registered
    """In which the other one waits."""
    reason: str
    """Who waits for whom, in words."""


def find_deadlock(waiting: str, peer: int | None = None) -> Deadlock | None:
    """A rank that waits for this one in a collective, while this one waits for it elsewhere.

    Ranks that are connected by sockets alone do not see where others wait.

    Args:
        waiting: Where this rank waits, such as "rank 0 waits in pl.barrier".
        peer: Whom it waits for; None for all.
    """
    # What is under way here may be what the other one waits for.
    if not others_idle():
        return None
    for transport in _transports:
        for blocked, collective in transport.blocked_peers():
            if peer in (None, blocked):
                return Deadlock(
                    transport,
                    f"{waiting} for rank {blocked}, which waits for it in {collective}. Every rank must make the same "
                    "calls in the same order",
                )
    return None


def entered() -> dict[str, int]:
    """The number of the last collective that this rank has entered, by transport."""
    return {transport.identity: transport.number for transport in _transports if transport.identity}


def under_way() -> list[str]:
    """The collectives that this rank is in, in words."""
    return sorted(filter(None, (transport.under_way for transport in _transports)))


def leave(patience: float) -> None:
    """Tells peers that this rank comes to no collective any more: of the exception that is on its way, if there is one.

    Args:
        patience: Seconds for which those under way may be ended before.
    """
    error, reason = sys.exc_info()[1], "pl.shutdown() while models were parallel: pl.release them first, on every rank"
    if error is None:
        wait_for_others(patience)
    _give_up(explain(error) if error is not None else reason)


def _give_up(reason: str) -> None:
    for transport in _transports:
        transport.abort(reason)


def _tell_of_exception() -> None:
    """Tells peers, at the interpreter's end, of an exception that nobody caught."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        _give_up(explain(error))


def _after_fork() -> None:
    """Lets go of the parent's connections, so that its death is seen while the child lives, and of what it shares."""
    inherited = list(_transports)
    for transport in inherited:
        transport.close_sockets()
    if inherited:
        make_private()


os.register_at_fork(after_in_child=_after_fork)
# What is registered last runs first: before the transports are closed.
atexit.register(_tell_of_exception)
