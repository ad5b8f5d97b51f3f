"""What all ranks must have alike, though each reads its own command line and its own files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import paceline as pl
from paceline.core.errors import UserError
from paceline.train.config import TrainConfig
from paceline.train.resume import flat

OF_EACH_HOST = ("threads", "workers", "min_workers", "spares", "data.path", "data.tokenizer", "data.cache")
"""Settings that may be others on another host."""
OF_RANK_0 = ("folder", "resume")
"""Those that all take from rank 0, which makes the run's folder: others may wait for it to be started anew."""


def settings_of_all(config: TrainConfig) -> TrainConfig:
    """Checks that all ranks were started with the same settings. A collective call.

    Returns:
        Those, with what rank 0 alone decides.

    Raises:
        UserError: They differ; says in what.
    """
    settings = flat(config.to_dict())
    require_alike(
        {name: value for name, value in settings.items() if name not in OF_EACH_HOST + OF_RANK_0},
        "settings",
        "Start the same command on every host.",
    )
    told = pl.all_gather_json([getattr(config, name) for name in OF_RANK_0], "the run to train")[0]
    return replace(config, **dict(zip(OF_RANK_0, told, strict=True)))


def require_alike(values: dict[str, Any], what: str, advice: str) -> None:
    """Checks that all ranks have the same values, of which only digests are exchanged if so. A collective call.

    Args:
        values: This rank's, by name; ready for JSON.
        what: They are.
        advice: What to do where they differ.

    Raises:
        UserError: They differ; says in what.
    """
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    if len(set(pl.all_gather_json(digest, f"a digest of {what}"))) == 1:
        return
    told: list[dict[str, Any]] = pl.all_gather_json(values, what)
    rank = next(rank for rank, theirs in enumerate(told) if theirs != told[0])
    names = [name for name in {**told[0], **told[rank]} if told[0].get(name) != told[rank].get(name)]
    raise UserError(
        f"{what} differ between ranks, so that each would train something else:\n"
        + "\n".join(f"  {name}: {told[0].get(name)} on rank 0, {told[rank].get(name)} on rank {rank}" for name in names)
        + f"\n{advice}"
    )
