"""Lines for people, which must not end a training."""

from __future__ import annotations

import sys


def show(*lines: str, warning: bool = False) -> None:
    """Prints lines to stdout, or warnings to stderr.

    Where the output goes to a file on a full disk the lines are lost and nothing else; where nobody reads it any
    more, BrokenPipeError is raised as usual.
    """
    stream = sys.stderr if warning else sys.stdout
    try:
        # At once, line ends included: an unbuffered stream would let other processes write in between.
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError:
        return
