"""Lines for people, which must not end a training."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

CLEAR = "\r\x1b[K"
"""Empties the line that the cursor is in, where a status line may stand (launch/status_line.py)."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys instead of showing it, but for line ends and tabs; and what reorders text."""


class OutputClosed(BrokenPipeError):
    """Nobody reads what is written to stdout or stderr any more, as after `| head -1`."""


def visible(text: str) -> str:
    """`text` with control characters written as in Python, so that a terminal shows and does not obey them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(*lines: str, warning: bool = False) -> None:
    """Prints lines to stdout, or warnings to stderr; what is `visible` of them, as names in them may be anybody's.

    Where the output goes to a file on a full disk the lines are lost and nothing else; where nobody reads it any
    more, OutputClosed is raised.
    """
    stream = sys.stderr if warning else sys.stdout
    clear = CLEAR if lines and columns(stream) is not None else ""
    try:
        # At once, line ends included: an unbuffered stream would let other processes write in between.
        stream.write(clear + "".join(f"{visible(line)}\n" for line in lines))
        stream.flush()
    except BrokenPipeError as error:
        raise OutputClosed(*error.args) from None
    except OSError:
        return


def columns(stream: TextIO) -> int | None:
    """How wide the terminal is that a stream writes to; None where it writes to none, or to one without a cursor."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None
