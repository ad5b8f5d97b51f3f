"""What a step computes beside gradients is made on their device: a copy from the host makes it wait for a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from paceline.engine.statistics import Statistics, length
from paceline.engine.tensors import square_sum

ELSEWHERE = torch.device("meta")


def test_the_sum_of_no_shards_is_where_the_others_are() -> None:
    assert square_sum([], ELSEWHERE).device == ELSEWHERE
    assert square_sum([torch.ones(3, device=ELSEWHERE)], ELSEWHERE).device == ELSEWHERE


def test_counts_of_one_rank_are_not_copied_from_the_host() -> None:
    def copied(*args: Any, **named: Any) -> None:
        raise AssertionError("on a GPU torch.tensor and torch.as_tensor copy from the host, which waits")

    statistics = Statistics(2, 1, torch.zeros(length(2), dtype=torch.float64, device=ELSEWHERE))
    statistics.add([8, torch.ones((), device=ELSEWHERE), 0.5])
    with patch("torch.tensor", copied), patch("torch.as_tensor", copied):
        statistics.close()
    assert statistics.result().shape == (3,) and statistics.result().device == ELSEWHERE
