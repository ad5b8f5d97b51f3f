"""A model goes to a GPU piece by piece, by way of memory that is written again only when it was read."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline.materialise import to_device
from paceline.materialise.to_device import Pieces, move

CPU = torch.device("cpu")


class Late:
    """Pinned memory whose reader reads when it is waited for, or at the end: what is written before it would be lost.

    Attributes:
        waits: How often that was.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._memory: list[Tensor] = []
        self._unread: list[tuple[Tensor, Tensor]] = []

    def pinned(self, size: int) -> Tensor:
        self._memory.append(torch.zeros(size, dtype=torch.uint8))
        return self._memory[-1]

    def event(self) -> Any:
        number = len(self._memory) - 1
        late = self

        class Event:
            def record(self) -> None:
                """The copy is on its way."""

            def synchronize(self) -> None:
                late.waits += 1
                late.read(number)

        return Event()

    def copy(self, target: Tensor, memory: Tensor) -> None:
        self._unread.append((target, memory))

    def read(self, number: int | None = None) -> None:
        """What lies in one piece of memory arrives, or all does."""
        whose = None if number is None else self._memory[number].untyped_storage().data_ptr()
        for target, memory in list(self._unread):
            if whose in (None, memory.untyped_storage().data_ptr()):
                target.data.copy_(memory)
        self._unread = [
            (target, memory)
            for target, memory in self._unread
            if whose not in (None, memory.untyped_storage().data_ptr())
        ]


def moved(late: Late, tensor: Tensor) -> Tensor:
    copy = Tensor.copy_

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            late.copy(self, source)
            return self
        return copy(self, source)

    with patch.object(Tensor, "copy_", copied), patch.object(to_device, "PIECE", 64):
        found = Pieces(CPU, late.pinned, late.event)(tensor)
    late.read()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (13, 7)])
def test_what_arrives_is_what_was_there(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    late = Late()
    found = moved(late, nn.Parameter(tensor) if tensor.is_floating_point() else tensor)
    assert torch.equal(found, tensor) and found.data_ptr() != tensor.data_ptr() and not found.requires_grad
    # Two pieces of memory are filled before one is waited for.
    assert late.waits == max(0, -(-tensor.nbytes // 64) - 2)


def test_a_wait_left_out_would_be_seen() -> None:
    late, tensor = Late(), torch.randn(200)
    with patch.object(Late, "read", lambda self, number=None: None):
        moved(late, tensor)
    assert late.waits
    wrong = Late()
    event = wrong.event

    def without() -> Any:
        made = event()
        made.synchronize = lambda: None
        return made

    with patch.object(wrong, "event", without):
        assert not torch.equal(moved(wrong, tensor), tensor)


def test_what_is_no_plain_memory_goes_as_torch_sends_it() -> None:
    late = Late()
    for tensor in (torch.randn(3, 4).t(), torch.zeros(0), torch.ones(2, device="meta")):
        found = Pieces(CPU if not tensor.is_meta else torch.device("meta"), late.pinned, late.event)(tensor)
        assert found.shape == tensor.shape and found.stride() == tensor.stride()
    assert late.waits == 0


def test_a_model_is_moved_with_what_it_ties_and_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    late = Late()
    model._apply(Pieces(CPU, late.pinned, late.event))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model[2].weight is model[0].weight and all(p.requires_grad for p in parameters)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    move(model, CPU)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
