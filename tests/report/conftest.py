from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.report.browser import Browser
from tests.train.conftest import nano, text

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
