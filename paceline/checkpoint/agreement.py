"""What went wrong on one rank of a collective call is raised on all."""

from __future__ import annotations

from paceline.comm.control import all_gather_json
from paceline.core.errors import UserError


def raise_first(error: Exception | None, label: str, what: str, value: str = "") -> str:
    """Raises on every rank what went wrong on any; returns rank 0's `value`. A collective call."""
    told = all_gather_json([None if error is None else reason(error), value], label)
    found = [message for message, _ in told]
    if not any(found):
        first: str = told[0][1]
        return first
    if error is not None and not what:
        raise error
    rank = next(rank for rank, message in enumerate(found) if message)
    who = "" if len(found) == 1 or found[rank].startswith("rank ") else f"rank {rank}: "
    raise UserError(f"{what}: {who}{found[rank]}".removeprefix(": ")) from error


def reason(error: Exception) -> str:
    """What went wrong, never empty: many errors say no more than what they are."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".removesuffix(": ")
