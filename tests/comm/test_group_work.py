"""Work of the process group that comes to its end between two looks at it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from paceline.comm.group_work import is_done


class EndsMeanwhile:
    """A message that arrives when a wait for it has just come to its end."""

    def __init__(self, fails: bool) -> None:
        self._waits, self._fails = 0, fails

    def wait(self, timeout: timedelta) -> bool:
        self._waits += 1
        if self._waits == 1 or self._fails:
            raise RuntimeError("Operation timed out!" if self._waits == 1 else "Connection closed by peer")
        return True

    def is_completed(self) -> bool:
        return True


def test_what_arrives_as_a_wait_ends_has_arrived() -> None:
    assert is_done(EndsMeanwhile(fails=False))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="closed by peer"):
        is_done(EndsMeanwhile(fails=True))  # type: ignore[arg-type]
