"""Files that are no readable text: passed over in one line, or listed in an error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paceline.core.errors import UserError
from paceline.data.config import DataConfig
from paceline.data.documents import read
from paceline.data.progress_bar import Report, progress
from paceline.data.scan import Reader, Scan, scan
from paceline.data.sources import Sources


def scan_readable(config: DataConfig, sources: Sources, report: Report | None) -> tuple[Scan, Reader, dict[str, str]]:
    """Scans the files that hold text. A file counts whole or not at all, so where some do not, the rest is read anew.

    Args:
        config: says what to do with the others.
        sources: the files.
        report: gets lines for people; None for silence.

    Returns:
        What `scan` does, and by path why files were passed over.

    Raises:
        UserError: no file holds text, or some do not and are not to be passed over; lists them. Else as `scan`.
    """
    passed_over: dict[str, str] = {}
    files = sources.files
    while files:
        unreadable: dict[str, str] = {}
        with progress("reading text", sources.read_size(), report) as advance:
            try:
                found, reader = scan(partial(read, files, config.text_field, unreadable), config.validation, advance)
            except UserError:
                # What is read anew may be without text for another reason.
                if not unreadable:
                    raise
        passed_over |= unreadable
        if not unreadable:
            return found, reader, passed_over
        files = [file for file in files if file.path not in unreadable]
    raise UserError(f"no text found in {sources.name}: {_list(passed_over)}")


def refuse_unreadable(config: DataConfig, unreadable: Mapping[str, str]) -> None:
    """Raises UserError with a list of the files, if there are any and the configuration says so."""
    if unreadable and config.unreadable == "refuse":
        raise UserError(f"data.unreadable is refuse, and of the files of data.path {_list(unreadable)}")


def describe_unreadable(unreadable: Mapping[str, str]) -> str:
    """One line for people."""
    first = next(iter(unreadable.values()))
    one = len(unreadable) == 1
    return f"warning: passed over {len(unreadable):,} {'file' if one else 'files'} without readable text" + (
        f": {first}" if one else f", the first: {first} (--data.unreadable refuse lists all)"
    )


def _list(unreadable: Mapping[str, str]) -> str:
    return f"{len(unreadable):,} hold no readable text:" + "".join(f"\n  {reason}" for reason in unreadable.values())
