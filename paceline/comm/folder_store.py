"""Where the ranks of one host meet: a folder, in which each key is a file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.0002, 0.01
"""Seconds between two looks for a key."""
_SHARE = 0.1
"""Of what has been waited so far: the next look comes after that."""


class FolderStore(dist.Store):  # type: ignore[misc, name-defined]
    """What ranks say to each other while they meet. Only this user can read or write it.

    Torch's `FileStore` looks for what others say every 10 ms, and ranks that meet ask each other a dozen things one
    after the other. This one looks sooner, as long as little time has passed.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is not there: its parent is."""
        super().__init__()
        self._folder, self._seconds = folder, 300.0
        folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Says something."""
        data = value.encode() if isinstance(value, str) else value
        temporary = self._folder / f".{os.getpid()}-{time.monotonic_ns()}"
        temporary.write_bytes(data)
        temporary.rename(self._path(key))

    def get(self, key: str) -> bytes:
        """What was said, once it is.

        Raises:
            torch.distributed.DistStoreError: It was not in time.
        """
        self.wait([key])
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all were said."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all were said.

        Raises:
            torch.distributed.DistStoreError: They were not in time.
        """
        began, seconds = time.monotonic(), self._seconds if timeout is None else timeout.total_seconds()
        paths = [self._path(key) for key in keys]
        while not all(path.exists() for path in paths):
            waited = time.monotonic() - began
            if waited > seconds:
                raise dist.DistStoreError(f"timeout waiting {seconds:g} s for {', '.join(keys)}")
            time.sleep(min(max(_SHORTEST, _SHARE * waited), _LONGEST))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait for a key from now on; 300 s at first."""
        self._seconds = timeout.total_seconds()

    def _path(self, key: str) -> Path:
        return self._folder / f"{quote(key, safe='')}.key"
