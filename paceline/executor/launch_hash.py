"""A number that tells whether ranks have launched the same collectives in the same order."""

from __future__ import annotations

from zlib import crc32

_SIZE = 1 << 20


class LaunchHash:
    """A hash of the targets of collectives on each stream, in their order there.

    Between streams there is no order that ranks share.
    """

    def __init__(self) -> None:
        """Nothing was launched yet."""
        self._of: dict[str, int] = {}

    def add(self, stream: str, target: str) -> None:
        """A collective was launched on a stream."""
        self._of[stream] = (self._of.get(stream, 0) * 31 + crc32(target.encode())) % _SIZE

    def take(self) -> int:
        """The hash of all since the last call: below 2**20, so that sums of its squares are exact in fp64."""
        found = sum(self._of.values()) % _SIZE
        self._of.clear()
        return found
