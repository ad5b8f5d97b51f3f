"""What `paceline faults` is told, apart from what does it, as that takes long to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.core.errors import UserError


@dataclass(frozen=True)
class FaultsArguments:
    """Brings faults about in small trainings, and compares what is left of each with one that was not disturbed."""

    action: Annotated[Literal["list", "run"], Value("ACTION", positional=True)]
    """list: what there is, what is expected, and what this machine lacks for it. run: bring it about."""
    name: Annotated[str, Value("NAME", positional=True)] = ""
    """One of them. Without it: those that take seconds."""
    all: bool = False
    """With run: those that take minutes, too, and those that need root."""
    json: JsonFile = ""
    """Where to write the results as JSON; - prints them, and all else goes to stderr."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: Two contradict each other.
        """
        if self.name and self.all:
            raise UserError(f"--all: runs every fault; leave it out to run {self.name}, or the name to run all")
