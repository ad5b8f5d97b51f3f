"""Measured hardware in the user's cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import UserError
from paceline.plan import profile_file
from paceline.plan.hardware import Hardware


def folder() -> Path:
    """Where measurements are kept."""
    return _caches() / "paceline" / "hardware"


def _caches() -> Path:
    """The user's folder for caches; that for temporary files where a user has no home, as in some containers."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # others are to be ignored, says the XDG base directory specification
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir())


def taken(path: Path, report: Callable[[str], object] = lambda _: None) -> Hardware | None:
    """What is kept in a file; None where nothing is, and where it is damaged, which `report` is told."""
    try:
        return profile_file.read(path) if os.path.exists(path) else None  # False, too, where nobody may look
    except UserError as error:
        report(f"{error}. It is measured anew")
        return None


def keep(path: Path, hardware: Hardware, report: Callable[[str], object]) -> None:
    """Keeps hardware in a file, or tells why it cannot be."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile_file.write(temporary, hardware)
        temporary.replace(path)
    except OSError as error:
        report(f"{path} cannot be written ({error.strerror}): the next plan measures again")
    finally:
        # Also where Ctrl-C came in between.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
