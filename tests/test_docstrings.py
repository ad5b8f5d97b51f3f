"""The public names tell a user at the prompt what they are for: tab completion, help() and --help, and examples run."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import io
import pydoc
import re
import subprocess
import sys
import tempfile

import pytest
import torch

import paceline as pl
from paceline import comm
from paceline.train.command_line import parse_train_arguments
from tests.ranks import RankPool

VALUES = {"SYSTEMS", "__version__"}
"""Public names of plain values, which help() knows by their type alone."""
NAMES = sorted(set(pl.__all__) - VALUES)
DATACLASSES = [name for name in NAMES if dataclasses.is_dataclass(getattr(pl, name))]


def examples_of(public: object, name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(public, name, module=False, globs={"torch": torch, "pl": pl})
    return [test for test in found if test.examples]


def ran(name: str) -> str:
    """Executes the examples in one name's docstring, as at a prompt; returns what went wrong."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for test in examples_of(getattr(pl, name), name):
            runner.run(test, out=report.write)
    return report.getvalue()


def test_dir_shows_the_public_names() -> None:
    assert dir(pl) == sorted(pl.__all__)


def test_looking_at_the_names_does_not_load_torch() -> None:
    look = "import sys, paceline; print('torch' in sys.modules, len(dir(paceline)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(len(pl.__all__))]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_tells_what_it_is_for(name: str) -> None:
    public = getattr(pl, name)
    text = pydoc.plain(pydoc.render_doc(public))
    assert len((public.__doc__ or "").split()) > 8
    if not isinstance(public, type):
        for parameter in pydoc.inspect.signature(public).parameters:
            assert parameter in ("model", "args", "kwargs") or f"{parameter}: " in text or f"`{parameter}`" in text


@pytest.mark.parametrize("name", DATACLASSES)
def test_help_shows_every_field_with_its_text(name: str) -> None:
    # Those that a schedule has from its bases are said there.
    own = vars(getattr(pl, name))["__annotations__"]
    text = pydoc.plain(pydoc.render_doc(getattr(pl, name)))
    for field in own:
        assert field.startswith("_") or re.search(rf"^ \|      {field}: \S+ \S", text, re.M), field


def test_the_command_line_tells_of_a_setting_what_help_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train_arguments(["--help-all"])
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    section = pl.Strategy.__doc__.split("Attributes:\n")[1].split("Raises:")[0]
    texts = re.findall(r"^ {8}\w+: (.*(?:\n {12}.*)*)", section, re.M)
    assert len(texts) == len(dataclasses.fields(pl.Strategy))
    for text in texts:
        # Behind a flag's own words its first letter is small.
        assert " ".join(text.split())[1:] in told


@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(getattr(pl, name), name)])
def test_examples_run_as_shown(ranks: RankPool, name: str) -> None:
    assert ranks(1, ran, name)[0] == ""


def test_most_names_have_an_example() -> None:
    assert sum(bool(examples_of(getattr(pl, name), name)) for name in NAMES) > len(NAMES) / 2


@pytest.mark.parametrize("name", comm.__all__)
def test_collectives_tell_what_they_do(name: str) -> None:
    assert len(getattr(comm, name).__doc__.split()) > 5
