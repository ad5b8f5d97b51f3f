"""Edits by way of `p.data` that would be lost are refused: at once on CPUs, one call later on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.buffers.edits import Edits
from paceline.comm.read_later import ReadLater
from paceline.core.errors import EngineError
from paceline.core.strategy import Strategy


@contextmanager
def gpu_memory() -> Iterator[None]:
    """Inside, what is compared is taken for a GPU's."""
    with patch("paceline.buffers.edits._asks_later", lambda memory: True):
        yield


def test_what_was_handed_in_comes_back_one_call_later_as_it_was() -> None:
    later, values = ReadLater(), torch.ones(2)
    assert later.exchange(values) is None
    values.fill_(2)
    first = later.exchange(values)
    values.fill_(3)
    second = later.exchange(values)
    assert first is not None and second is not None
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_host_learns_of_an_edit_when_it_asks_the_next_time(dtype: torch.dtype) -> None:
    memory = torch.zeros(12, dtype=dtype)
    parameters = [nn.Parameter(memory[:5]), nn.Parameter(memory[5:])]
    with gpu_memory():
        edits = Edits(parameters, {0: memory[:5], 1: memory[5:]})
    edits.set()
    assert edits.found() is None and edits.found() is None
    parameters[1].data.fill_(1)
    assert edits.found() is None
    # Whatever an update makes of it meanwhile.
    edits.set()
    assert edits.found() == 1
    assert edits.found() is None


def edited(zero: int) -> tuple[int, str]:
    """In which step an edit in the second one was refused, and what was said."""
    with gpu_memory():
        torch.manual_seed(0)
        model = pl.parallelize(nn.Linear(4, 2), Strategy(zero=zero, precision="bfloat16"))  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters())
        try:
            for step in range(5):
                model(torch.ones(3, 4)).float().square().mean().backward()
                if step == 1:
                    for parameter in model.parameters():
                        parameter.data.mul_(0.9)
                optimizer.step()
                optimizer.zero_grad()
        except EngineError as error:
            return step, str(error)
        finally:
            pl.reset(model)
            pl.release(model)
    return -1, ""


@pytest.mark.parametrize("zero", [0, 1])
def test_it_is_refused_in_the_next_step(ranks, zero: int) -> None:
    for step, said in ranks(2, edited, zero):
        assert step == 2 and "was edited, but this rank updates" in said
