"""What a step computes beside gradients is made on their device: a copy from the host makes it wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.buffers import statistics_numel
from paceline.executor.statistics import Statistics
from paceline.tensors.reduced_norm import norms_of

ELSEWHERE = torch.device("meta")


class Crossings(TorchDispatchMode):
    """Inside, notes what is written elsewhere: from where, and whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, bool]] = []
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].device == ELSEWHERE:
            on, source = args[:2]
            goes_on = bool(args[2]) if len(args) > 2 else bool((kwargs or {}).get("non_blocking", False))
            self.copies.append((source.device.type, goes_on or source.device == on.device))
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.scalar_tensor.default):
            self.made += 1
        return func(*args, **(kwargs or {}))


def crossings(fill: Callable[[], object]) -> Crossings:
    with Crossings() as found:
        fill()
    return found


def test_the_sum_of_no_shards_is_where_the_others_are() -> None:
    assert norms_of([], ELSEWHERE).device == ELSEWHERE
    assert norms_of([torch.ones(3, device=ELSEWHERE)], ELSEWHERE).device == ELSEWHERE


def test_counts_of_one_rank_are_not_copied_from_the_host() -> None:
    def copied(*args: Any, **named: Any) -> None:
        raise AssertionError("on a GPU torch.tensor and torch.as_tensor copy from the host, which waits")

    statistics = Statistics(2, 1, torch.zeros(statistics_numel(2), dtype=torch.float64, device=ELSEWHERE))
    statistics.add([8, torch.ones((), device=ELSEWHERE), 0.5])
    with patch("torch.tensor", copied), patch("torch.as_tensor", copied):
        statistics.close()
    assert statistics.result().shape == (3,) and statistics.result().device == ELSEWHERE


def test_a_ranks_numbers_go_to_the_device_in_one_piece_that_nobody_waits_for() -> None:
    statistics = Statistics(2, 2, torch.zeros(statistics_numel(2), dtype=torch.float64, device=ELSEWHERE))
    # A host's tensor is read there; what the device has stays there.
    statistics.add([8, torch.ones((), device=ELSEWHERE), torch.ones(())])
    norms = torch.ones(2, dtype=torch.float64, device=ELSEWHERE)
    # The flags of a step like the one before are there already.
    statistics.fill([0], [], norms, (1, 99))
    found = crossings(lambda: statistics.fill([0], [], norms, (1, 99)))
    assert found.copies == [("meta", True), ("meta", True), ("cpu", True), ("meta", True)]
    assert found.made == 0


def test_what_is_assigned_to_an_element_would_be_seen() -> None:
    elsewhere = torch.zeros(4, device=ELSEWHERE)

    def assign(value: float | Tensor) -> None:
        elsewhere[1] = value

    assert crossings(lambda: assign(torch.ones(()))).copies == [("cpu", False)]
    assigned = crossings(lambda: assign(1.0))
    assert assigned.copies or assigned.made
