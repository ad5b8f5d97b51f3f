from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import paceline as pl

ORDER = (
    "test_transport",
    "test_streams",
    "test_trainer",
    "test_equality",
    "test_one_device",
    "test_programs",
    "test_no_waiting",
    "test_everyday",
    "test_host_time",
    "test_memory",
    "test_examples",
)
"""What the others rest on comes first, as time on a GPU may end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in ORDER."""
    places = {f"{name}.py": place for place, name in enumerate(ORDER)}
    items.sort(key=lambda item: places.get(item.path.name, -1))


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    """This process as a job of one rank on a GPU."""
    pl.shutdown()
    yield pl.init(device="cuda").device
    pl.shutdown()
