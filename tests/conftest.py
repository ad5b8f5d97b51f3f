from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.ranks import RankPool

# A busy machine makes single examples slow without anything being wrong. CI draws the same examples for the same code.
settings.register_profile("full", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)


def pytest_configure(config: pytest.Config) -> None:
    """How many examples are drawn, unless a test says so: few where cases marked `full` are left out."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As shells leave it in the background; programs that tests start would inherit that, and pass over Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("quick" if "not full" in config.getoption("markexpr") else "full")
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and thousands of cases stay to the end: looking at them whenever memory is collected takes long."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """A second thread gains nothing on tensors this small, and waits for its turn where other tests' ranks are."""
    # Not where this file is read: the process that hands tests to others needs no torch.
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
