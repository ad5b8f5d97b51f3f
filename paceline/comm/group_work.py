"""Work of torch's process group on CPUs, waited for a while at a time, and what is said where a rank did not come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from paceline.comm.transport import CommunicationError
from paceline.comm.world import keep_process_group, require_rank

LOOK_SECONDS = 0.5
"""Between looks, while others do not come, at whether they wait for this rank elsewhere."""


def started(start: Callable[[], dist.Work | None], label: str) -> dist.Work:
    """Starts a collective of the process group.

    Raises:
        CommunicationError: A rank is gone, or this process is none.
    """
    require_rank(label)
    try:
        work = start()
    except RuntimeError as error:
        raise lost(label) from error
    assert work is not None
    return work


def is_done(work: dist.Work) -> bool:
    """Waits a while; whether it is done.

    Raises:
        RuntimeError: It failed.
    """
    try:
        work.wait(timedelta(seconds=LOOK_SECONDS))
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have come to its end since the wait had.
        work.wait(timedelta(seconds=LOOK_SECONDS))
    return True


@contextmanager
def group_kept_after(work: dist.Work) -> Iterator[None]:
    """Where the inside gives up before the work is done, the process group cannot be ended without waiting for it."""
    try:
        yield
    except BaseException:
        if not work.is_completed():
            keep_process_group()
        raise


def lost(label: str, within: str = "", told: Sequence[str] = ()) -> CommunicationError:
    """The error of a rank that did not come.

    Args:
        label: What was waited for.
        within: For how long, in words.
        told: What is known of other ranks.
    """
    return CommunicationError(
        "; ".join([f"a rank is gone or did not answer{within} in {label}", *told])
        + ". Every rank must call it, equally often; if a rank failed, what it raised says more"
    )
