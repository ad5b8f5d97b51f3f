"""The processes of a training, by a variable of the environment that it was started with."""

from __future__ import annotations

import contextlib

from paceline.launch.worker import PROCESSES, told


def marked(name: str, value: str) -> dict[int, dict[str, str]]:
    """What each process that has a variable was told (`told`), by its number, in the order in which they were started.

    Args:
        name: Of the variable.
        value: That it has.
    """
    found = []
    for entry in PROCESSES.iterdir():
        if entry.name.isdigit():
            # It may end meanwhile.
            with contextlib.suppress(OSError):
                environment = told(int(entry.name))
                state, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
                if environment.get(name) == value and state != "Z":
                    # By when it was started, as the kernel's numbers begin anew after the largest.
                    found.append((int(rest[18]), int(entry.name), environment))
    return {number: environment for _, number, environment in sorted(found, key=lambda each: each[:2])}
