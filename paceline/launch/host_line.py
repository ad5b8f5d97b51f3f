"""The line between the launchers of two hosts: signed messages, and signs of life apart from what ranks do."""

from __future__ import annotations

import socket
import time
from typing import Any

from paceline.comm.authentication import SignedMessages
from paceline.comm.patience import Silence

SIGN_SECONDS = 1.0
CUT_OFF_SECONDS = 10.0
"""Of silence after which the leading launcher takes a host's workers for lost."""
FENCED_SECONDS = 6.0
"""Of silence after which another host's launcher ends its own workers: before others go on without them."""


class HostLine:
    """One end of it.

    Attributes:
        is_lost: Whether the other launcher is gone, or was silent for too long.
    """

    def __init__(self, connection: socket.socket, secret: bytes, own: int, other: int, silent: float) -> None:
        """Takes over a connection that has proved to be of this job.

        Args:
            connection: To the other host's launcher.
            secret: The job's.
            own: This host.
            other: The other one.
            silent: Seconds without a word after which it is lost, in which this process ran.
        """
        self.connection = connection
        self.is_lost = False
        self._messages = SignedMessages(connection, secret, f"host {own} to {other}", f"host {other} to {own}")
        self._silence = Silence(silent)
        self._due = 0.0

    def send(self, **message: Any) -> None:
        """Says something; nothing where the other one is lost."""
        if self.is_lost:
            return
        try:
            self._messages.send(message)
        except ConnectionError:
            self.is_lost = True

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived."""
        try:
            messages = [] if self.is_lost else self._messages.receive()
        except OSError:
            self.is_lost = True
            return []
        if messages:
            self._silence.end()
        return messages

    def give_sign(self, **sign: Any) -> None:
        """Gives a sign of life when it is time: many times a second.

        Args:
            sign: What to say with it.
        """
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SIGN_SECONDS
            self.send(sign=sign)

    def tend(self, **sign: Any) -> None:
        """The same, and notices when the other one gives none."""
        self.give_sign(**sign)
        self.is_lost = self.is_lost or self._silence.left() <= 0

    def close(self) -> None:
        """Lets go of the connection."""
        self.is_lost = True
        self._messages.close()
