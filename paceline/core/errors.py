"""The one exception type for mistakes a user can make and mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in input, configuration or environment that the user can mend.

    The message says what was expected, what came, and what to do. The command line prints it
    without a traceback and exits with status 2.

    Example:
        >>> pl.Strategy(zero=4)
        Traceback (most recent call last):
        ...
        paceline.core.errors.UserError: strategy.zero: expected one of 0, 1, 2, 3, ...
    """


class EngineError(RuntimeError):
    """The training loop did something that would give wrong gradients or let replicas drift apart.

    It is raised before a weight changes. The message names the model's part and the call to use in its place. After one
    in a step, `pl.reset(model)` on every rank makes the model usable again.
    """
