"""What a fault needs of the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable


def needs_root(*programs: str, packages: str = "") -> Callable[[], str]:
    """A function that names what is lacking: root, or any of the programs, which are in these packages."""

    def missing() -> str:
        lacking = [] if os.geteuid() == 0 else ["root"]
        absent = [name for name in programs if shutil.which(name) is None]
        return ", ".join(lacking + [f"the program {name}{packages and f' (package {packages})'}" for name in absent])

    return missing
