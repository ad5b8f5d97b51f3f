"""Runs cases one after another, and those that differ once more to find out where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.ranks import RankPool, RanksFailed
from paceline.verify.alone import step_file, train_alone
from paceline.verify.evidence import Difference, Report, together
from paceline.verify.recipe import Recipe
from paceline.verify.subject import Subject
from paceline.verify.together import Case, train_together

TRACEABLE = ("loss", "gradient", "norm")
"""Kinds of difference whose cause lies in what is only compared when a step is inspected."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    case: Case
    report: Report
    raised: str = ""
    """The exception, where a rank raised one."""
    details: str = ""
    """Its traceback."""

    @property
    def equal(self) -> bool:
        """Whether N ranks had what one process has."""
        return not self.raised and self.report.first is None

    @property
    def verdict(self) -> str:
        """In one word."""
        return "equal" if self.equal else "raises" if self.raised else "differs"


class Comparison:
    """Holds cases of one number of ranks against references, which are made when they are first needed."""

    def __init__(self, subject: Subject, alone: RankPool, ranks: RankPool, folder: Path, limit: float) -> None:
        """Starts nothing.

        Args:
            subject: What is trained.
            alone: One process.
            ranks: As many as the cases have.
            folder: Where the batches are and references go.
            limit: Seconds for one run of a case.
        """
        self._subject, self._alone, self._ranks = subject, alone, ranks
        self._folder, self._limit = folder, limit

    def run(self, case: Case) -> Outcome:
        """Runs a case; where it differs, runs it again to find the first op that can explain it.

        Raises:
            UserError: The reference cannot be made.
        """
        if not step_file(self._folder, case.recipe, case.recipe.steps).exists():
            self._make_reference(case.recipe, None)
        try:
            report = self._train(case, None)
            if report.first is not None and report.first.kind in TRACEABLE:
                self._make_reference(case.recipe, report.first.step)
                report = Report(report.largest, _clearer(report.first, self._train(case, report.first.step).first))
            return Outcome(case, report)
        except RanksFailed as failed:
            return Outcome(case, Report(), failed.summary, failed.failure.text)
        except UserError as error:
            return Outcome(case, Report(), str(error))

    def run_all(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Runs cases in order."""
        return map(self.run, cases)

    def _train(self, case: Case, inspect: int | None) -> Report:
        args = (self._subject, case, self._folder, inspect)
        return together(self._ranks.run(train_together, *args, limit=self._limit))

    def _make_reference(self, recipe: Recipe, inspect: int | None) -> None:
        try:
            self._alone.run(train_alone, self._subject, recipe, self._folder, inspect, limit=self._limit)
        except RanksFailed as failed:
            raise UserError(f"one process alone cannot train the model:\n{failed.failure.text}") from None


def _clearer(first: Difference, again: Difference | None) -> Difference:
    """The difference as the inspection saw it, if it did."""
    return again if again is not None and again.step <= first.step else first
