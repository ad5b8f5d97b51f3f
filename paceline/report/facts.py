"""Where a run took place: what its environment.json says that a page needs."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Facts(msgspec.Struct):
    """The host and the ranks of its latest start."""

    started: str = ""
    host: str = ""
    processor: str = ""
    gpus: list[str] = []
    ranks: int = 0
    ranks_per_host: int = 0
    threads_per_rank: int = 0
    backend: str = ""
    versions: dict[str, str | None] = {}


def read_facts(path: Path, problems: list[str]) -> Facts:
    """Reads a run's environment.json, as far as it can be.

    Args:
        path: The file.
        problems: Gets a sentence where the file cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Facts)
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return Facts()
