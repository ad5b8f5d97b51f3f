"""What a rank that is elsewhere in a test waits for."""

from __future__ import annotations

import time
from pathlib import Path


def wait_until_told(told: Path, seconds: float = 4.0) -> None:
    """What a rank does that is elsewhere: nothing, until another has seen what it was to see, or for long after."""
    deadline = time.monotonic() + seconds
    while not told.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
