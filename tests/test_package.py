"""What a package index and the reference say of paceline is what is there."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import paceline as pl
from tests.ranks import RankPool

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / PROJECT["readme"]).read_text()


def test_the_version_is_said_once() -> None:
    assert "version" in PROJECT["dynamic"]
    assert version("paceline") == pl.__version__
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == pl.__version__


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.rst").read_text()
    names = re.findall(r"^\.\. (?:auto|py:)\w+:: (?:[\w.]+\.)?(\w+)", page, re.M)
    assert sorted(names) == sorted(pl.__all__)


def test_a_package_index_shows_all_of_its_page() -> None:
    # It has no files beside it: neither pictures nor pages.
    assert re.findall(r"\]\(|<img|^\[.*\]:", PAGE, re.M) == []


def run_page() -> int:
    names: dict[str, object] = {}
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(compile(text, "package.md", "exec"), names)
    return int(str(names["step"]))


@pytest.mark.parametrize("n", [1, 2])
def test_its_loop_runs(ranks: RankPool, n: int) -> None:
    assert ranks(n, run_page) == [9] * n
