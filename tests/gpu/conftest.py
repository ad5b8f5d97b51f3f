from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import paceline as pl


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """This process as a job of one rank on a GPU."""
    pl.shutdown()
    yield pl.init(device="cuda").device
    pl.shutdown()
