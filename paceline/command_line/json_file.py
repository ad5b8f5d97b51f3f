"""`--json FILE` of every command, and `--json -` for the screen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from paceline.command_line.options import Value
from paceline.core.errors import UserError

JsonFile = Annotated[str, Value("FILE")]
"""The type of an option that says where to write JSON; empty for nowhere."""
SCREEN = "-"


def write(file: str, value: Any) -> None:
    """Writes a value as JSON.

    Args:
        file: Where to; - for stdout, empty for nowhere.
        value: What JSON knows.

    Raises:
        UserError: The file cannot be written.
    """
    text = json.dumps(value, indent=1) + "\n"
    if file == SCREEN:
        sys.stdout.write(text)
    elif file:
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json: {file} cannot be written: {error.strerror}; choose another file") from None
