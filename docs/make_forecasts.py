"""Writes what commands of planning.md print, and the tables of its rule: python docs/make_forecasts.py.

A block behind a line `<!-- prints -->` is what the first command of the block before it prints, but for what a command
writes to files; behind `<!-- prints from "TEXT" -->`, from the line on that begins with TEXT.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import tempfile
from pathlib import Path
from unittest.mock import patch

from paceline.cli import main

PAGE = Path(__file__).parent / "planning.md"
COLUMNS = "112"
"""As wide as a page of the documentation."""

_MARKED = re.compile(
    r"(?P<before>```bash\n(?P<command>[^\n#]*)(?:(?!```bash).)*?"
    r'<!-- prints(?: from "(?P<first>[^"]*)")? -->\n```text\n).*?(?P<end>```\n)',
    re.S,
)


def printed(command: str) -> str:
    """What a command prints to stdout."""
    words = shlex.split(command)
    assert words[0] == "paceline", command
    out, home = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, COLUMNS=COLUMNS):
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                assert main(words[1:]) == 0, command
        finally:
            os.chdir(home)
    return out.getvalue()


def page(text: str) -> str:
    """The page with what its commands print today."""

    def filled(match: re.Match[str]) -> str:
        found = printed(match["command"])
        if match["first"]:
            found = found[found.index("\n" + match["first"]) + 1 :]
        return f"{match['before']}{found.rstrip()}\n{match['end']}"

    filled_page, count = _MARKED.subn(filled, text)
    assert count == text.count("<!-- prints"), "a mark stands behind no command"
    for name, table in runpy.run_path(str(PAGE.parent / "rule_tables.py"))["tables"]().items():
        begin = f"<!-- table: {name} -->\n"
        before, _, after = filled_page.partition(begin)
        filled_page = f"{before}{begin}{table}\n{after[after.index('<!-- end -->') :]}"
    return filled_page


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
