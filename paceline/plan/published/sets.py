"""The published files themselves: where they are, and which of them constants were fitted to."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import UserError
from paceline.plan.published.describe import Sample, describe
from paceline.plan.published.model_states import tells_states
from paceline.plan.published.predict import predict
from paceline.plan.published.table import Table, read

FITTED_FILES = ("llm_foundry.csv", "vtrain_a100.csv")
"""Files that constants are fitted to."""

PUBLISHED = Path("../shared/published")
"""Where the files are looked up, from the folder that a command runs in or that the package lies in."""


def find_folder(given: str = "") -> Path:
    """The folder of published files.

    Args:
        given: As the user names it; "" for the usual place.

    Raises:
        UserError: It is no folder, or lacks the files that constants are fitted to.
    """
    package = Path(__file__).resolve().parents[3]
    places = [Path(given)] if given else [PUBLISHED, package / PUBLISHED]
    for place in places:
        if all((place / name).is_file() for name in FITTED_FILES):
            return place
    raise UserError(
        f"--published {given or PUBLISHED}: expected a folder with {' and '.join(FITTED_FILES)}, found none; "
        "name it with --published FOLDER"
    )


def tables(folder: Path) -> list[Table]:
    """Every file of the folder that has measurements of runs, or model states, by name."""
    read_all = (read(path) for path in sorted(folder.glob("*.csv")))
    return [table for table in read_all if any("gpu" in row.values or tells_states(row) for row in table.rows)]


def fitted_samples(folder: Path) -> list[list[Sample]]:
    """The rows that constants are fitted to, by file."""
    return [samples(read(folder / name)) for name in FITTED_FILES]


def samples(table: Table) -> list[Sample]:
    """Rows of a file whose step can be predicted, with what was measured; the others are left out."""
    found = []
    for row in table.rows:
        try:
            found.append(Sample(describe(row), predict(row).measured))
        except UserError:
            continue
    return found
