"""`paceline plan --validate`: how wrong forecasts are, on published measurements and on the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.command_line import json_file
from paceline.command_line.json_file import JsonFile
from paceline.command_line.options import Value
from paceline.command_line.parse import parse_known
from paceline.core.errors import UserError
from paceline.plan.published.errors import Errors, errors
from paceline.plan.published.table import read
from paceline.plan.published.validate import Checked, baseline, check, order, to_dict

ACCURACY = Path("docs/accuracy.md")
"""Where the page of all tables is written, from the folder that the command runs in."""


@dataclass(frozen=True)
class ValidateArguments:
    """Compares forecasts with measurements: a step's time, and peak memory where a file tells it.

    Without FILE every published table is predicted, with what each fold of the fit leaves out, and docs/accuracy.md is
    written. With FILE the rows of that CSV are: one line each, then mean, median and p90 beside what one constant MFU
    would give. Columns that are not known are named, rows that cannot be predicted are listed with the reason.
    """

    validate: Annotated[tuple[str, ...], Value("FILE")] = ()
    """CSV files of measurements, with columns as in the published ones; none for all published ones."""
    published: Annotated[str, Value("FOLDER")] = ""
    """Where the published files are, if not in ../shared/published."""
    json: JsonFile = ""
    """Where to write all of it as JSON; - prints it and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Prints how wrong forecasts are; returns the exit status, 1 where no row of any file could be compared.

    Raises:
        UserError: A file is not there or no table of measurements.
    """
    options, others = parse_known(ValidateArguments, arguments, "paceline plan --validate")
    if others:
        raise UserError(
            f"{others[0]}: --validate takes measurements alone, whose rows say what ran and where: expected FILE, "
            "--published or --json beside it"
        )
    if not options.validate:
        return _validate_published(options)
    if options.published:
        raise UserError("--published: says where all published files are; leave it out where --validate names files")
    checked = [check(read(path)) for path in options.validate]
    found = [to_dict(each) for each in checked]
    json_file.write(options.json, found[0] if len(found) == 1 else {"files": found})
    if options.json != json_file.SCREEN:
        for each in checked:
            print("\n".join(_lines(each)))
    return 0 if any(each.times or each.memories for each in checked) else 1


def _validate_published(options: ValidateArguments) -> int:
    from paceline.plan.published.accuracy import evaluate
    from paceline.plan.published.accuracy_page import page

    result = evaluate(options.published)
    json_file.write(options.json, result.to_dict())
    text = page(result)
    if options.json != json_file.SCREEN:
        print(text)
    if not ACCURACY.parent.is_dir():
        return 0
    try:
        ACCURACY.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{ACCURACY} cannot be written: {error.strerror}") from None
    if options.json != json_file.SCREEN:
        print(f"written to {ACCURACY}")
    return 0


def _lines(checked: Checked) -> Iterable[str]:
    """All that there is to say of a file."""
    yield f"{checked.table.path}: {_rows(len(checked.table.rows))}"
    if checked.table.unknown:
        yield f"Columns that are not known, and play no part: {', '.join(checked.table.unknown)}"
    if checked.times:
        yield f"\n{'line':>6}  {'measured':>12}  {'predicted':>12}  {'error':>7}  run"
        for row, each in checked.times:
            run = each.described.run
            marks = f"; {', '.join(each.described.assumed)}" if each.described.assumed else ""
            named = row.values.get("model") or f"{run.config.layers} x {run.config.width}"
            yield (
                f"{row.line:>6}  {each.measured:>10.4g} s  {each.step.total:>10.4g} s  {each.error:>+7.1%}  "
                f"{named} on {run.devices} {each.described.gpu}{marks}"
            )
    if checked.memories:
        yield f"\n{'line':>6}  {'memory':>7}  {'measured':>12}  {'predicted':>12}  {'error':>7}"
        for row, held in checked.memories:
            if held.steady is not None and held.steady_predicted is not None:
                yield _memory_line(row.line, "steady", held.steady, held.steady_predicted)
            if held.ran_out:
                told = "no device known" if held.available is None else f"of {held.available / 2**30:.1f} GiB"
                yield f"{row.line:>6}  {'peak':>7}  {'ran out':>12}  {held.peak_predicted / 2**30:>8.2f} GiB  {told}"
            elif held.peak is not None:
                yield _memory_line(row.line, "peak", held.peak, held.peak_predicted)
    if checked.refused:
        yield f"\nNot predicted: {len(checked.refused):,}"
        for row, reason in checked.refused:
            yield f"{row.line:>6}  {reason}"
    yield ""
    yield _figures("step time", errors([each.error for _, each in checked.times]))
    if checked.times:
        yield _figures("one constant MFU", baseline(checked.times))
        right, pairs = order(checked.times)
        if pairs:
            yield f"{right:,} of {pairs:,} pairs of a table are in the measured order ({right / pairs:.1%})"
        formula = [each.error for _, each in checked.times if each.described.by_formula]
        if formula and len(formula) < len(checked.times):
            yield _figures("of it tensor or pipeline ranks, by formula", errors(formula))
    for name, of in (("steady memory", checked.steady), ("peak memory", checked.peak)):
        if of is not None:
            yield _figures(name, of)
    if checked.wrongly_fits:
        lines = ", ".join(str(row.line) for row in checked.wrongly_fits)
        yield f"predicted to fit, but ran out of memory: lines {lines}"


def _memory_line(line: int, name: str, measured: float, predicted: float) -> str:
    sizes = f"{measured / 2**30:>8.2f} GiB  {predicted / 2**30:>8.2f} GiB"
    return f"{line:>6}  {name:>7}  {sizes}  {predicted / measured - 1:>+7.1%}"


def _figures(name: str, found: Errors | None) -> str:
    if found is None:
        return f"{name}: no row to compare"
    return (
        f"{name}: mean {found.mean:.1%}, median {found.median:.1%}, p90 {found.p90:.1%}, "
        f"largest {found.worst:.1%} of {_rows(found.rows)}"
    )


def _rows(count: int) -> str:
    return f"{count:,} row{'s' if count != 1 else ''}"
