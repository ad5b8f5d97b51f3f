"""Lets transformers' models attend as they do in a run: each row of a batch is one sample."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unpacked() -> Iterator[None]:
    """Tells transformers' models that no row of a batch is of several samples.

    They look at the values of positions to find out. Where these have no memory they take rows for packed, and compute
    attention with a mask of all scores instead of the kernel that skips what lies ahead.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    own = getattr(masking, "find_packed_sequence_indices", None)
    if own is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = own
