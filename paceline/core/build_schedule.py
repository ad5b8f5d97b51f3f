"""The schedule of a rank: the engine's, or that of a historical system. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.layout import Layout
from paceline.core.parameter_server import ParameterServer
from paceline.core.schedule import Schedule
from paceline.core.strategy import Strategy


def build_schedule(
    layout: Layout,
    strategy: Strategy,
    world_size: int,
    rank: int,
    order: Sequence[str],
    deferred: Iterable[str] = (),
    statistics: int = 0,
) -> Schedule:
    """The schedule of a rank; see `Placement` and `Transfers` for what it is made of.

    Args:
        layout: Of the model, for this strategy and number of ranks.
        strategy: How it is shared.
        world_size: Number of ranks.
        rank: This rank.
        order: Units that run, in the order of the forward pass.
        deferred: Units whose gradients come after the whole backward.
        statistics: How many numbers the ranks agree on.
    """
    kind = ParameterServer if strategy.has_server(world_size) else Schedule
    return kind(layout, strategy, world_size, rank, tuple(order), frozenset(deferred), statistics)
