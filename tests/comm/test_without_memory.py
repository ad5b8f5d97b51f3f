"""Ranks that cannot share memory talk over sockets, and say so."""

from __future__ import annotations

import contextlib
import warnings
from unittest.mock import patch

import pytest
import torch

import paceline as pl
from paceline.comm.connect import open_transport


def without_memory(how: str) -> tuple[list[float], str, list[str]]:
    """Rank 1 has no memory to share, or none of the processors that shared memory is written for."""
    world = pl.init()
    broken = {
        "no memfd": patch("os.memfd_create", side_effect=OSError("no such call")),
        "another processor": patch("platform.machine", return_value="aarch64"),
    }
    with warnings.catch_warnings(record=True) as caught, broken[how] if world.rank == 1 else contextlib.nullcontext():
        warnings.simplefilter("always")
        transport = open_transport(world)
    buffer = torch.full((3,), 1.0 + world.rank)
    transport.run("all_reduce", buffer, "test")
    transport.close()
    return buffer.tolist(), transport.name, [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("how", "words"), [("no memfd", "gives no memory to share"), ("another processor", "on aarch64 stores may be seen")]
)
def test_ranks_that_cannot_share_memory_use_sockets_and_say_so(ranks, how, words) -> None:
    first, second, third = ranks(3, without_memory, how)
    assert first == ([6.0] * 3, "shared memory and tcp", []) and third == first
    assert second[:2] == ([6.0] * 3, "tcp")
    (warning,) = second[2]
    assert "talk over sockets, which are slower than shared memory" in warning and words in warning
