"""`paceline faults`: brings faults about and says what became of the training."""

from __future__ import annotations

import difflib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from paceline.command_line import json_file
from paceline.command_line.parse import parse
from paceline.core.errors import UserError
from paceline.faults.arguments import FaultsArguments
from paceline.faults.fault import Fault
from paceline.faults.outcome import Curve, curve
from paceline.faults.table import FAULTS
from paceline.faults.training import FaultError, LackingError, Training, make_text
from paceline.launch.screen import show
from paceline.launch.temporary_folder import TemporaryFolder


@dataclass(frozen=True)
class Result:
    """What became of one.

    Attributes:
        fault: Its name.
        done: What was done.
        expected: What was expected.
        result: Skipped ones were not tried.
        words: What shows that it struck, what was wrong, or what the machine lacks.
        seconds: How long it took.
    """

    fault: str
    done: str
    expected: str
    result: Literal["passed", "FAILED", "skipped"]
    words: str
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Does what the command line says; returns the exit status: 1 if the outcome of any was not the expected one.

    Raises:
        UserError: There is no such fault, or the training cannot be run without one.
    """
    given = parse(FaultsArguments, arguments, "paceline faults")
    chosen = _chosen(given)
    warning = given.json == json_file.SCREEN
    if given.action == "list":
        lacking = {fault.name: _missing(fault) for fault in chosen}
        for fault in chosen:
            show(
                f"{fault.name:<17}{'long' if fault.long else 'quick':<7}{fault.done}: {fault.expected}", warning=warning
            )
            if lacking[fault.name]:
                show(f"{'':<24}not here: needs {lacking[fault.name]}", warning=warning)
        rows = [
            {"fault": each.name, "long": each.long, "done": each.done, "expected": each.expected}
            | {"missing": lacking[each.name]}
            for each in chosen
        ]
        json_file.write(given.json, {"faults": rows})
        return 0
    results: list[Result] = []
    show(
        f"{'fault':<17}{'result':<9}{'seconds':>7}  what was done, what is expected, and what shows it", warning=warning
    )
    try:
        with TemporaryFolder("faults") as folder:
            make_text(folder.path / "text")
            expected: dict[int, Curve] = {}
            for fault in chosen:
                results.append(found := _brought_about(fault, folder.path, expected))
                head = f"{found.fault:<17}{found.result:<9}{found.seconds:7.1f}"
                show(f"{head}  {found.done}: {found.expected}", f"{'':<35}{found.words}", warning=warning)
    finally:
        # What there is of it, too, when it is interrupted.
        json_file.write(given.json, {"results": [asdict(each) for each in results]})
    counts = {kind: sum(each.result == kind for each in results) for kind in ("passed", "FAILED", "skipped")}
    show(", ".join(f"{count} {kind}" for kind, count in counts.items()), warning=warning)
    return int(counts["FAILED"] > 0)


def _chosen(given: FaultsArguments) -> list[Fault]:
    """The faults to list or run.

    Raises:
        UserError: There is none of that name.
    """
    known = {fault.name: fault for fault in FAULTS}
    if given.name and given.name not in known:
        near = difflib.get_close_matches(given.name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise UserError(f"there is no fault {given.name!r}; {hint}")
    if given.name:
        return [known[given.name]]
    return [fault for fault in FAULTS if given.all or given.action == "list" or not fault.long]


def _missing(fault: Fault) -> str:
    return "Linux" if not sys.platform.startswith("linux") else fault.missing()


def _brought_about(fault: Fault, folder: Path, expected: dict[int, Curve]) -> Result:
    """Brings one about and compares what is left.

    Args:
        fault: It.
        folder: For what is written; nothing stays there.
        expected: Undisturbed runs by their steps; one that is missing is made.
    """

    def result(kind: Literal["passed", "FAILED", "skipped"], words: str) -> Result:
        return Result(fault.name, fault.done, fault.expected, kind, words, time.monotonic() - began)

    began = time.monotonic()
    if lacking := _missing(fault):
        return result("skipped", f"needs {lacking}")
    if fault.trains and fault.steps not in expected:
        expected[fault.steps] = _undisturbed(folder, fault.steps)
        began = time.monotonic()
    training = Training(folder / fault.name, folder / "text", fault.steps)
    try:
        struck = fault.act(training)
        if fault.trains:
            training.go_on()
            training.check(expected[fault.steps])
    except LackingError as error:
        return result("skipped", f"needs {error}")
    except FaultError as error:
        return result("FAILED", str(error))
    except (UserError, OSError, LookupError) as error:
        # Such as a process that is not there any more when it is to be struck.
        return result("FAILED", f"{type(error).__name__}: {error}")
    finally:
        training.end()
        shutil.rmtree(training.folder, ignore_errors=True)
    return result("passed", struck)


def _undisturbed(folder: Path, steps: int) -> Curve:
    training = Training(folder / f"undisturbed-{steps}", folder / "text", steps)
    try:
        if training.wait(training.start()):
            raise UserError(f"the training cannot be run without a fault: {training.tail()}")
        return curve(training.run)
    finally:
        training.end()
