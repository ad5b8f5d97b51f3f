"""What is said of a model that cannot run without memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from paceline.core.errors import UserError
from paceline.plan.observed_pass import ObservedPass


@contextmanager
def failures_told(seen: ObservedPass, model: nn.Module) -> Iterator[None]:
    """Says which operator of which unit could not run.

    Raises:
        UserError: What was raised inside, told.
    """
    # torch writes a traceback of its own to the screen.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # A model's own code raises what it likes.
        said = " ".join(str(error).split())[:300].rstrip(".")
        name = type(model).__name__
        if seen.failed is None:
            raise UserError(f"{name} cannot be traced: it raised {type(error).__name__}: {said}") from error
        operator, unit = seen.failed
        why = (
            "depends on values, which a model without memory does not have, or is not known to torch's shape rules "
            f"({type(error).__name__}: {said})"
        )
        if type(error) in (RuntimeError, ValueError, IndexError, TypeError):
            why = f"raised {type(error).__name__}: {said}; see that what the model is called with suits it"
        raise UserError(f"{name} cannot be traced: {operator} in {unit or 'the model itself'} {why}") from error
    finally:
        log.disabled = was
