"""Runs cases one after another, and those that differ once more to find out where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError
from paceline.launch.pool import RankPool, RanksFailed
from paceline.verify.differences import Difference, Report, merge_reports
from paceline.verify.model_spec import ModelSpec
from paceline.verify.parallel_run import Case, train_parallel
from paceline.verify.recipe import Recipe
from paceline.verify.reference_run import step_file, train_reference

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
        """The verdict in one word."""
        return "equal" if self.equal else "raises" if self.raised else "differs"


class Comparison:
    """Holds cases of one number of ranks against references, which are made when they are first needed."""

    def __init__(self, spec: ModelSpec, single: RankPool, ranks: RankPool, folder: Path, limit: float) -> None:
        """Starts nothing.

        Args:
            spec: What is trained.
            single: One process.
            ranks: As many as the cases have.
            folder: Where the batches are and references go.
            limit: Seconds for one run of a case.
        """
        self._spec, self._single, self._ranks = spec, single, ranks
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
        args = (self._spec, case, self._folder, inspect)
        return merge_reports(self._ranks.run(train_parallel, *args, limit=self._limit))

    def _make_reference(self, recipe: Recipe, inspect: int | None) -> None:
        try:
            self._single.run(train_reference, self._spec, recipe, self._folder, inspect, limit=self._limit)
        except RanksFailed as failed:
            raise UserError(f"one process alone cannot train the model:\n{failed.failure.text}") from None


def _clearer(first: Difference, again: Difference | None) -> Difference:
    """The difference as the inspection saw it, if it did."""
    return again if again is not None and again.step <= first.step else first
