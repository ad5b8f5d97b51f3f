"""On a GPU the host learns one step later that ranks saw a step differently."""

from __future__ import annotations

import pytest
import torch

from paceline.core.buffers import statistics_numel
from paceline.core.errors import EngineError
from paceline.executor.statistics import Statistics


def step(statistics: Statistics, *checks: tuple[int, int]) -> None:
    """As two ranks' numbers add up."""
    total = torch.zeros_like(statistics.buffer)
    for mine in checks:
        statistics.fill([0], [], torch.zeros(0), mine)
        total += statistics.buffer
    statistics.buffer.copy_(total)
    statistics.require_alike()


@pytest.mark.parametrize(("differs", "words"), [((1, 9), "numbers of micro-batches"), ((0, 7), "different orders")])
def test_a_step_that_ranks_see_differently_is_refused_in_the_next(differs: tuple[int, int], words: str) -> None:
    statistics = Statistics(1, 2, torch.zeros(statistics_numel(1), dtype=torch.float64))
    statistics.asks_later = True
    step(statistics, (0, 9), (0, 9))
    step(statistics, (0, 9), differs)
    with pytest.raises(EngineError, match=words):
        step(statistics, (0, 9), (0, 9))
