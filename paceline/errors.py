"""The one exception type for mistakes a user can make and mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in input, configuration or environment that the user can mend.

    The message says what was expected, what came, and what to do. The command line prints it
    without a traceback and exits with status 2.
    """
