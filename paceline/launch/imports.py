"""Imports of what makes hundreds of thousands of objects, none of them garbage."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """What is imported inside, torch with it, is not looked at when memory is collected: neither now nor ever.

    A worker has imported all in four fifths of the time then, and a collection amid training takes milliseconds. Where
    torch is there already nothing happens: what such a process has made since may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
