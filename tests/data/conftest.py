from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.data.config import DataConfig
from tests.data.prose import prose

# A busy machine makes single examples slow without anything being wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 60 small text files, some below others."""
    root = tmp_path / "text"
    for number in range(60):
        path = root / f"part{number % 3}" / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n" + prose(100 + number, number), encoding="utf-8")
    return root


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., DataConfig]:
    """A DataConfig with a small vocabulary and a cache of its own."""

    def make(*paths: Path | str, **fields: object) -> DataConfig:
        fields = {"vocabulary": 300, "validation": 0.2, "cache": str(tmp_path / "cache"), **fields}
        return DataConfig(path=tuple(map(str, paths)), **fields)  # type: ignore[arg-type]

    return make
