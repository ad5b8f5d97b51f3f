"""What tests of the token cache share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.data import DataConfig

Configure = Callable[..., DataConfig]


def entries(cache: Path) -> dict[str, bytes]:
    """Every file of every cache entry with its content."""
    root = cache / "corpora"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
