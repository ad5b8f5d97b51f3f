"""Norms of gradients by parameter and rank, as gradient_norms.jsonl has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.engine.engine import Engine
from paceline.executor.chunk_products import ChunkProducts

Norm = float | str | None
"""A norm; "inf" or "nan", which JSON has no numbers for; None where there is no gradient."""


def norms_of_rank(engine: Engine) -> dict[str, list[Any]] | None:
    """This rank's of the latest step, ready for JSON; None if none were taken."""
    norms = engine.gradient_norms()
    return None if norms is None else asdict(norms)


def norm_lines(
    step: int, rows: Sequence[dict[str, list[Any]] | None], names: Sequence[str], copies: int
) -> list[dict[str, Any]]:
    """A line for each parameter that has gradients.

    Args:
        step: Number of the step, from 1.
        rows: Every rank's `norms_of_rank`.
        names: Of the parameters, by slot of the layout.
        copies: How many ranks hold each element after reductions.

    Returns:
        Of each parameter "step", "parameter", "local": by micro-batch that was reduced and rank, "reduced": by rank,
        and "whole": the norm of the reduced gradient.
    """
    known = [row for row in rows if row is not None]
    if not known or len(known) < len(rows):
        return []
    lines = []
    for index, name in enumerate(names):
        local = [[part[index] for part in parts] for parts in zip(*(row["local"] for row in known), strict=True)]
        reduced = [row["reduced"][index] for row in known]
        parts = [part for part in reduced if part is not None]
        if parts or any(norm is not None for norms in local for norm in norms):
            lines.append(
                {
                    "step": step,
                    "parameter": name,
                    "local": [[_plain(norm) for norm in norms] for norms in local],
                    "reduced": [_plain(norm) for norm in reduced],
                    "whole": _plain(math.hypot(*parts) / math.sqrt(copies)) if parts else None,
                }
            )
    return lines


def product_lines(step: int, found: Sequence[ChunkProducts], parts: int) -> list[dict[str, Any]]:
    """A line of chunk_products.jsonl for each bucket.

    Args:
        step: Number of the step, from 1.
        found: Of the step's last micro-batch.
        parts: How many of its micro-batches were reduced.

    Returns:
        Of each bucket "step", "bucket", "parts", and "products": by chunk, as in `ChunkProducts`; null is not finite.
    """
    return [
        {
            "step": step,
            "bucket": each.bucket,
            "parts": parts,
            "products": [
                [float(f"{value:.12g}") if math.isfinite(value) else None for value in values]
                for values in each.products
            ],
        }
        for each in found
    ]


def _plain(norm: float | None) -> Norm:
    if norm is None:
        return None
    return float(f"{norm:.7g}") if math.isfinite(norm) else str(norm)
