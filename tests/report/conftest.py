from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.cli import main
from paceline.models.transformer import Block
from tests.report.browser import Browser
from tests.train.conftest import nano, text
from tests.train.processes import trained

__all__ = ["browser", "nano", "page", "text"]

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium without a window, shared by tests as it takes long to start."""
    if not CHROMIUM or not DRIVER:
        pytest.skip("needs chromium and chromium-driver (Debian's packages)")
    pytest.importorskip("selenium", reason="needs selenium, of the dev extra")
    opened = Browser(CHROMIUM, DRIVER, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser, which has told of no error when the test is over."""
    yield browser
    assert browser.complaints() == []


@contextlib.contextmanager
def slow_rank() -> Iterator[None]:
    """Inside, the blocks of rank 1 take their time."""
    plain = Block.forward

    def forward(self: Block, *arguments: Any, **more: Any) -> Any:
        if pl.init().rank == 1:
            time.sleep(0.05)
        return plain(self, *arguments, **more)

    Block.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Block.forward = plain  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def run(ranks: Any, text: Path, nano: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, of which one is slow, and its page."""
    folder = tmp_path_factory.mktemp("reported")
    flags = ["--steps", "16", "--log.every", "4", "--log.events-every", "4", "--strategy.zero", "2", "--folder", "run"]
    status, _, errors = trained(ranks, 2, folder, [*nano, *flags], slow_rank)
    assert status == 0, errors
    assert main(["report", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def shown(run: Path, page: Browser) -> Browser:
    page.open(run / "report.html")
    return page
