"""The arguments of `torch.amp.GradScaler` are taken; that ranks decide alike is in tests/engine/test_precision.py."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.core.errors import UserError


def made_for(device: str) -> tuple[float, float]:
    pl.init(device="cpu")
    return pl.GradScaler(device, init_scale=4.0).get_scale(), pl.GradScaler(device=device).get_scale()


def test_the_device_may_be_said_as_to_torch(ranks) -> None:
    assert ranks(1, made_for, "cpu") == [(4.0, 65536.0)]


def refused() -> str:
    pl.init(device="cpu")
    with pytest.raises(UserError) as caught:
        pl.GradScaler("cuda")
    return str(caught.value)


def test_another_device_than_the_job_s_is_refused(ranks) -> None:
    assert ranks(1, refused) == ["pl.GradScaler: expected device='cpu', as ranks compute there, got 'cuda'"]
