"""What a rank really holds in its steps: what the schedule says, a unit's gradients, and activations."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.memory import memory
from paceline.materialise.freed import forget_memory, return_freed_memory
from paceline.measuring.meters import held_bytes, pages, watching_memory
from tests.engine.models import WORLDS
from tests.quick import some

MIB = 2**20
WIDTH, BLOCKS = 768, 24
SLACK = 8.0
"""MiB, twice the most that was measured: the kernels' own buffers, activations, threads, and a unit's gradients,
which are at two places while they are collected."""
KEPT = 16.0
"""MiB that may stay with the C library when a model and its optimizer's states are there: 12 were measured, and 18 to
32 where what the model was built with is not given back."""
CPU = torch.device("cpu")


class Wide(nn.Module):
    """Parameters of 54 MiB, activations of next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class MallInfo2(ctypes.Structure):
    """What glibc 2.33 or newer tells of its memory: mallinfo(3)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def in_use(device: torch.device) -> int:
    """Bytes that this process has allocated, and its part of memory that ranks share.

    Not its pages: of what another thread freed the C library gives back only what lies between things in use, so that
    in a process that ran other tests a step takes pages which were there before.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo2
    found = mallinfo2()
    return found.hblkhd + found.uordblks + pages("Pss_Shmem")


def peak(strategy: pl.Strategy) -> tuple[float, float, float, float]:
    """MiB that a rank adds at most in later steps, the least and the most that was measured, and as predicted; and what
    is kept beside them.
    """
    # Once before: kernels and the C library take buffers of their own when they are first used.
    train(strategy)
    # What earlier jobs of this process left must not be freed while this one is measured.
    forget_memory()
    pl.barrier()
    base = in_use(CPU)
    peaks, predicted, kept = train(strategy, base, 5)
    for _ in range(2):
        # A rank that is held up while it steps leaves more; one that was built wastefully does so each time.
        if all(pl.all_gather_json(kept < KEPT * MIB)):
            break
        forget_memory()
        kept = min(kept, train(strategy)[2])
    return (min(peaks) - base) / MIB, (max(peaks) - base) / MIB, predicted / MIB, kept / MIB


def expected(least: float, most: float, predicted: float) -> bool:
    return predicted < most and least < predicted + SLACK * MIB


def train(strategy: pl.Strategy, base: int = 0, windows: int = 1) -> tuple[list[int], int, int]:
    """Bytes that this process uses at most from the third step on, those that are predicted, and what is kept by then.

    In several windows, until every rank has what is expected beyond the `base` that was there. On a busy machine a rank
    that is held up lets its peers' tensors live longer, and who looks every few ms may come too late for the most.
    """
    model = pl.parallelize(Wide(), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    kept = held_bytes(CPU)
    return_freed_memory()
    kept -= held_bytes(CPU)
    predicted, peaks = memory(pl.engine_of(model).schedule).total, list[int]()
    while len(peaks) < windows and not (
        peaks and all(pl.all_gather_json(expected(min(peaks) - base, max(peaks) - base, predicted)))
    ):
        pl.barrier()
        with patch("paceline.measuring.meters.held_bytes", in_use), watching_memory(CPU) as most:
            for _ in range(2):
                step()
            pl.barrier()
            peaks.append(most())
    pl.barrier()
    pl.release(model)
    return peaks, predicted, kept


LARGE = {
    name: (replace(strategy, bucket_mb=2.25), n)
    for name, (strategy, n) in WORLDS.items()
    if name in ("zero 0, N=2", "zero 2, N=2", "zero 3, N=2", "zero 3, 2 x 2", "zero 2, shared parameters")
}


QUICK = {"zero 3, N=2"}
"""That a host holds one copy where ranks share memory, test_shared_parameters.py tells in every run."""


@pytest.mark.full
@pytest.mark.parametrize("name", some(LARGE, QUICK))
def test_a_step_holds_no_more_than_its_schedule_says(ranks, name) -> None:
    strategy, n = LARGE[name]
    for least, most, predicted, kept in ranks(n, peak, strategy):
        assert expected(least * MIB, most * MIB, predicted * MIB), (least, most, predicted)
        assert kept < KEPT
