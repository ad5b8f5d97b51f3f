"""Refuses what a user gives in the place of a model and a strategy."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.core.errors import UserError
from paceline.core.strategy import Strategy


def require_model_and_strategy(call: str, model: Any, strategy: Any) -> None:
    """Sees that a public call got a module, and a `Strategy` or None.

    Raises:
        UserError: It got something else, which the message names, with the call.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{call}: expected a model, a torch.nn.Module, got {type(model).__name__}; of several models, {call} each"
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        example = "pl.Strategy(**strategy)" if isinstance(strategy, dict) else "pl.Strategy(zero=2)"
        raise UserError(f"{call}: expected the strategy as a pl.Strategy, got {strategy!r:.80}: write {example}")
