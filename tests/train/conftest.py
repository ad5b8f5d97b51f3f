from __future__ import annotations

import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight small documents of made-up words."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        rng = random.Random(number)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(60)]
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(words, k=700)))
    return folder


@pytest.fixture(scope="session")
def nano(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a training that steps in milliseconds."""
    cache = tmp_path_factory.mktemp("cache")
    return [
        *("--model.preset", "nano", "--data.vocabulary", "300", "--data.validation", "0.3"),
        *("--data.path", str(text), "--data.cache", str(cache), "--threads", "1"),
    ]
