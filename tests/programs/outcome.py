"""What became of a program, told from what every rank saw and what one process computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.programs.adapter import Note, Plain, Weights
from tests.programs.program import Program

RIGHT, REFUSED, UNSERVED = "right", "refused", "UNSERVED"
FINE = (RIGHT, REFUSED)
KINDS = (RIGHT, REFUSED, "WRONG", UNSERVED, "UNCLEAR", "CHANGED", "RAISED", "HUNG", "INVALID")
"""refused: an error of paceline's where the rule allows it. UNSERVED: where it does not, as DDP runs the program.
UNCLEAR: it does not say what to do. CHANGED: the weights were changed, or lost, before. RAISED: any other error. HUNG:
a wait until the time limit. INVALID: the reference failed."""

OURS = ("EngineError", "UserError", "DisagreementError")
CUT_OFF = ("CommunicationError", "TimeoutError", "DistBackendError")
REMEDY = re.compile(r"pl\.|strategy|\b(call|set|use|run|name|leave|put|move|give|make|read|keep|do)\b", re.I)


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        error: Name of the class of what was raised; empty: the loop ended.
        message: Of the error.
        where: The last lines of its traceback.
        changes: How often the loop had changed weights.
        weights: In the end; after an error, once every rank has called `pl.reset`. None where they cannot be read.
        notes: The loop's.
        late: Whether it waited until the time limit.
    """

    error: str = ""
    message: str = ""
    where: str = ""
    changes: int = 0
    weights: Weights | None = None
    notes: list[Note] = field(default_factory=list)
    late: bool = False


@dataclass
class Outcome:
    """What became of a program: one of `KINDS`, and why."""

    kind: str
    why: str = ""

    @property
    def fine(self) -> bool:
        """Whether it is what the rule asks for."""
        return self.kind in FINE


def judge(
    program: Program, reference: Plain, ranks: Sequence[Seen], tolerance: float = 1e-9, noted: float = 1e-9
) -> Outcome:
    """Holds what ranks saw against what one process computed.

    Args:
        program: What they ran.
        reference: What one process computed.
        ranks: What each rank saw.
        tolerance: How far weights may be off, relative above 1.
        noted: How far what the loop noted may be.
    """
    for rank, seen in enumerate(ranks):
        if seen.error and seen.error not in (*OURS, *CUT_OFF) and not seen.late:
            return Outcome("RAISED", f"rank {rank}: {seen.error}: {seen.message}\n{seen.where}")
    errors = [(rank, seen) for rank, seen in enumerate(ranks) if seen.error in OURS]
    if errors:
        rank, first = errors[0]
        told = f"rank {rank} after {first.changes} changes: {first.error}: {first.message}"
        quiet = [rank for rank, seen in enumerate(ranks) if not seen.error]
        if any(seen.late for seen in ranks):
            return Outcome("HUNG", f"others waited until the time limit. {told}")
        if quiet:
            return Outcome("CHANGED", f"ranks {quiet} ended without an error. {told}")
        for rank, seen in enumerate(ranks):
            wrong = _difference_to_states(seen, reference, max(tolerance, noted))
            if wrong:
                return Outcome("CHANGED", f"rank {rank}: {wrong}. {told}")
        if not (program.lenient or (program.edits_lost and "was edited" in first.message)):
            return Outcome(UNSERVED, told)
        return Outcome(REFUSED if REMEDY.search(first.message) else "UNCLEAR", told)
    for rank, seen in enumerate(ranks):
        if seen.error:
            return Outcome(
                "HUNG" if seen.late else "RAISED", f"rank {rank}: {seen.error}: {seen.message}\n{seen.where}"
            )
    for rank, seen in enumerate(ranks):
        assert seen.weights is not None
        wrong = _difference_of_notes(seen.notes, reference.notes, rank, noted)
        wrong = wrong or _difference(seen.weights, reference.states[-1], tolerance)
        if wrong:
            return Outcome("WRONG", f"rank {rank}: {wrong}")
    return Outcome(RIGHT)


def furthest(weights: Weights, notes: list[Note], reference: Plain) -> tuple[float, float]:
    """How far weights and what ranks noted are at most from the reference's, as `judge` measures both."""
    pairs = zip(weights, reference.states[-1], strict=True)
    off = max(_apart(value, mine[name]) for mine, theirs in pairs for name, value in theirs.items())
    noted = [
        _apart(b, a)
        for (_, mine), (_, theirs) in zip(notes, reference.notes, strict=True)
        for a, b in zip(mine, theirs, strict=True)
        if a is not None and b is not None
    ]
    return off, max(noted, default=0.0)


def _difference_to_states(seen: Seen, reference: Plain, tolerance: float) -> str:
    """How weights after an error differ from those of the last update, or of the one that the error came out of."""
    if seen.weights is None:
        return f"the weights could not be read after the error and pl.reset: {seen.where}"
    near = reference.states[seen.changes : seen.changes + 2]
    found = [_difference(seen.weights, state, tolerance) for state in near]
    return "" if "" in found else found[0] if found else "more changes than in the reference"


def _difference(weights: Weights, wanted: Weights, tolerance: float) -> str:
    for model, (mine, theirs) in enumerate(zip(weights, wanted, strict=True)):
        if mine.keys() != theirs.keys():
            return f"model {model} has {sorted(mine.keys() ^ theirs.keys())} too many or too few"
        wrong = {name: _apart(value, mine[name]) for name, value in theirs.items()}
        worst = max(wrong, key=wrong.__getitem__)
        if not wrong[worst] <= tolerance:
            names = [name for name, apart in wrong.items() if not apart <= tolerance]
            return f"model {model}: {worst} is off by {wrong[worst]:.1e}, {len(names)} of {len(wrong)} are"
    return ""


def _difference_of_notes(notes: list[Note], wanted: list[Note], rank: int, tolerance: float) -> str:
    if [name for name, _ in notes] != [name for name, _ in wanted]:
        return f"noted {[name for name, _ in notes]} and not {[name for name, _ in wanted]}"
    for number, ((name, mine), (_, theirs)) in enumerate(zip(notes, wanted, strict=True)):
        a, b = mine[rank], theirs[rank]
        if a is not None and b is not None and not _apart(b, a) <= tolerance:
            return f"note {number}, {name}, is off by {_apart(b, a):.1e}"
    return ""


def _apart(wanted: torch.Tensor, value: torch.Tensor) -> float:
    """The largest difference, relative above 1; infinite for another shape, and where only one is NaN."""
    if wanted.shape != value.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    # A state that is gathered is on the host, wherever the model is.
    wanted, value = wanted.double().cpu(), value.double().cpu()
    apart = ((wanted - value).abs() / wanted.abs().clamp(min=1)).max().item()
    return float("inf") if apart != apart else apart
