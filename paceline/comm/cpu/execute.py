"""Runs a prepared collective: signals between ranks of one host, messages between hosts."""

from __future__ import annotations

from paceline.comm.cpu.prepared import PreparedCollective
from paceline.comm.cpu.signals import Signals
from paceline.comm.cpu.tcp import TcpConnections


def execute(collective: PreparedCollective, signals: Signals | None, connections: TcpConnections | None) -> None:
    """Returns when this rank's part is complete.

    Args:
        collective: What to run.
        signals: Between the ranks of this host; None where this rank is alone there.
        connections: To ranks of other hosts; None where there are none.

    Raises:
        CommunicationError: A peer is gone, gave up, is silent for too long, or runs something else.
    """
    if collective.fill is not None:
        collective.fill()
    if connections is not None:
        connections.begin(collective.digest, collective.text)
    if signals is None:
        _execute_remote(collective, connections)
        return
    signals.begin(collective.digest, collective.text)
    for each in collective.rounds:
        for encode in each.encode:
            # Before peers look: what is sent rounded is kept rounded.
            encode()
        if each.publishes_start:
            signals.publish(each.start)
        for peer, stage in each.wait_before:
            signals.wait(peer, stage)
        if connections is not None and (each.sends or each.receives):
            connections.exchange(each.start, each.sends, each.receives, signals.check)
        for peer in each.sources:
            signals.wait(peer, each.start)
        for kernel in each.kernels:
            kernel()
        if each.publishes_end:
            signals.publish(each.end)
        if each.write_back:
            for peer in each.readers:
                signals.wait(peer, each.end)
            for kernel in each.write_back:
                kernel()
    for peer, stage in collective.wait_after:
        signals.wait(peer, stage)


def _execute_remote(collective: PreparedCollective, connections: TcpConnections | None) -> None:
    """Runs a collective of a rank that is alone on its host."""
    for each in collective.rounds:
        for encode in each.encode:
            encode()
        if connections is not None:
            connections.exchange(each.start, each.sends, each.receives, _nothing)
        for kernel in (*each.kernels, *each.write_back):
            kernel()


def _nothing() -> None:
    pass
