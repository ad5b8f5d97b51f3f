from __future__ import annotations

import pytest

from paceline.bench import ranks
from paceline.launch.pool import RankPool


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> object:
    """Benchmarks' ranks start from a process that has torch: their times are not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RankPool", lambda n, threads, fresh: RankPool(n, threads))
        yield
