from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.data import DataConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocabulary": 256}, "at least 257"),
        ({"validation": 0.0}, "between 0 and 1"),
        ({"validation": 1.0}, "between 0 and 1"),
        ({"validation": float("nan")}, "between 0 and 1"),
        ({"path": "text.txt"}, "list of paths"),
        ({"path": ("",)}, "empty string"),
        ({"text_field": ""}, "text_field"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)  # type: ignore[arg-type]


def test_cache_is_the_field_then_the_environment_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    assert DataConfig().cache_folder == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "/elsewhere")
    assert DataConfig().cache_folder == Path("/elsewhere")
    assert DataConfig(cache="/chosen").cache_folder == Path("/chosen")
