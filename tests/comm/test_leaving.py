"""How a rank on a GPU leaves its job: with the others where it may wait for them, without them after a failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from paceline.comm import gpu_streams, world
from paceline.comm.world import World
from paceline.core.errors import UserError


@pytest.fixture
def left() -> Iterator[list[str]]:
    """How the job is left, which is one on GPUs that are made up."""
    found: list[str] = []
    with (
        patch.object(world, "_world", World(0, 2, device=torch.device("cuda", 0))),
        patch.object(world, "_failed", False),
        patch("torch.distributed.is_initialized", lambda: True),
        patch("torch.distributed.destroy_process_group", lambda: found.append("with the others")),
        patch.object(world, "abort_process_group", lambda: found.append("alone")),
        patch.object(world, "let_end", lambda seconds: found.append("ends its own")),
        patch.object(sys, "last_value", None, create=True),
    ):
        yield found


def test_shutdown_is_a_call_of_all(left: list[str]) -> None:
    world.shutdown()
    assert left == ["with the others"]


def test_after_a_failure_it_is_not(left: list[str]) -> None:
    world.note_failure()
    world.shutdown()
    assert left == ["alone"]


def test_nor_while_an_exception_is_on_its_way(left: list[str]) -> None:
    with pytest.raises(ValueError, match="a broken model"):
        try:
            raise ValueError("a broken model")
        finally:
            world.shutdown()
    assert left == ["alone"]


def test_a_program_that_ends_waits_for_no_other_rank(left: list[str]) -> None:
    world._leave_at_exit()
    assert left == ["ends its own", "alone"]


def test_one_that_an_exception_ends_waits_for_nothing(left: list[str]) -> None:
    with patch.object(sys, "last_value", ValueError("a broken model")):
        world._leave_at_exit()
    assert left == ["alone"]


def test_on_cpus_it_leaves_as_ever(left: list[str]) -> None:
    with patch.object(world, "_world", World(0, 2)):
        world._leave_at_exit()
    assert left == ["with the others"]


def test_the_wait_for_ones_own_gpu_ends() -> None:
    class Busy:
        def __init__(self, looks: int) -> None:
            self.looks = looks

        def is_idle(self) -> bool:
            self.looks -= 1
            return self.looks < 0

    quick: Any
    stuck: Any
    quick, stuck = Busy(3), Busy(1 << 30)
    with patch.object(gpu_streams, "_gpu_streams", [quick]):
        assert gpu_streams.let_end(5.0)
    with patch.object(gpu_streams, "_gpu_streams", [stuck]):
        assert not gpu_streams.let_end(0.03)


def test_an_error_of_nccls_blames_no_port() -> None:
    said = "NCCL error in: here\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 50"
    with (
        pytest.raises(UserError, match="Duplicate GPU detected : rank 1 and rank 0") as raised,
        world._joining(1, 2, "x"),
    ):
        raise dist.DistBackendError(said)
    assert "MASTER_PORT" not in str(raised.value)
    with pytest.raises(UserError, match="MASTER_PORT"), world._joining(1, 2, "x"):
        raise dist.DistNetworkError("The server socket has failed to listen")
