"""`paceline faults`: brings faults about and says what became of the training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from paceline.command_line import json_file
from paceline.command_line.options import Value
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.faults.outcome import Curve, curve
from paceline.faults.table import FAULTS, Fault
from paceline.faults.training import FaultError, Training, make_text
from paceline.launch.screen import show
from paceline.launch.temporary_folder import TemporaryFolder


@dataclass(frozen=True)
class FaultsArguments:
    """Brings faults about in a small training and compares what is left with an undisturbed one.

    Attributes:
        action: list the faults, or run them.
        name: The fault to run; by default all that are quick.
        all: Run the long ones too.
        json: Write the results to this file as JSON; - for the screen.
    """

    action: Annotated[Literal["list", "run"], Value("ACTION", positional=True)]
    name: Annotated[str, Value("NAME")] = ""
    all: bool = False
    json: json_file.JsonFile = ""


def main(arguments: Sequence[str]) -> int:
    """Does what the command line says; returns the exit status: 1 if the outcome of any was not the expected one.

    Raises:
        UserError: There is no such fault.
    """
    words = list(arguments)
    if words[:1] == ["run"] and len(words) > 1 and not words[1].startswith("-"):
        words.insert(1, "--name")
    given = parse(FaultsArguments, words, "paceline faults")
    if given.name and given.name not in {fault.name for fault in FAULTS}:
        raise UserError(f"there is no fault {given.name!r}; known: {', '.join(fault.name for fault in FAULTS)}")
    quiet = given.json == json_file.SCREEN
    chosen = [fault for fault in FAULTS if given.name in ("", fault.name)]
    if given.action == "list":
        for fault in chosen:
            show(f"{fault.name:<14} {'long' if fault.long else 'fast'}  {fault.done}: {fault.expected}", warning=quiet)
        json_file.write(given.json, [_row(fault, "", 0.0) for fault in chosen])
        return 0
    chosen = [fault for fault in chosen if given.all or given.name or not fault.long]
    rows = []
    with TemporaryFolder("faults") as folder:
        make_text(folder.path / "text")
        expected = _undisturbed(folder.path)
        for number, fault in enumerate(chosen):
            show(f"[{number + 1}/{len(chosen)}] {fault.name}: {fault.done}; expected: {fault.expected}", warning=quiet)
            began = time.monotonic()
            result = _run(fault, folder.path, expected)
            rows.append(_row(fault, result, time.monotonic() - began))
            show(f"  {result}, {rows[-1]['seconds']:.1f} s", warning=quiet)
    json_file.write(given.json, rows)
    counts = {
        kind: sum(row["result"].startswith(kind) for row in rows) for kind in ("as expected", "FAILED", "skipped")
    }
    show(", ".join(f"{count} {kind}" for kind, count in counts.items()), warning=quiet)
    return int(counts["FAILED"] > 0)


def _row(fault: Fault, result: str, seconds: float) -> dict[str, Any]:
    return {"fault": fault.name, "done": fault.done, "expected": fault.expected, "result": result, "seconds": seconds}


def _undisturbed(folder: Path) -> Curve:
    training = Training(folder / "undisturbed", folder / "text", {})
    try:
        if training.wait(training.start()):
            raise UserError(f"the training cannot be run without a fault: {training.said()[-600:]}")
        return curve(training.run)
    finally:
        training.end()


def _run(fault: Fault, folder: Path, expected: Curve) -> str:
    """Brings one about; what came of it, in words."""
    if lacking := fault.missing():
        return f"skipped: needs {lacking}"
    training = Training(folder / fault.name, folder / "text", expected)
    try:
        fault.act(training)
        if training.run.parent == training.folder:
            training.go_on()
            training.check()
    except FaultError as error:
        return f"FAILED: {error}"
    finally:
        training.end()
    return "as expected"
