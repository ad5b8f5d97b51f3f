"""`paceline verify`: which comparison runs, and where it keeps its files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from paceline.command_line import json_file
from paceline.launch.pool import import_ahead
from paceline.launch.temporary_folder import TemporaryFolder
from paceline.verify.arguments import parse


def main(arguments: Sequence[str]) -> int:
    """Runs the comparison; returns the exit status: 0 if all is equal, 1 if not."""
    options = parse(arguments)
    import_ahead()
    # Users name modules of the folder that they are in.
    sys.path.insert(0, os.getcwd())
    with TemporaryFolder("verify") as folder:
        if options.matrix:
            from paceline.verify.matrix import run_matrix

            return run_matrix(options.markdown, options.timeout, folder.path)
        from paceline.verify.user_model import verify_model

        screen = sys.stderr if options.json == json_file.SCREEN else sys.stdout
        with contextlib.redirect_stdout(screen):
            status, comparisons = verify_model(options, folder.path)
        json_file.write(options.json, {"build": options.build, "ranks": options.workers, "comparisons": comparisons})
        return status
