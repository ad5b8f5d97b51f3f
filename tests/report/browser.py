"""Pages as Chromium shows them: opened from the file, without a network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PATIENCE = 60.0
"""Seconds after which a page that is not as expected is a failure."""


class Browser:
    """One window."""

    def __init__(self, chromium: str, driver: str, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.window = webdriver.Chrome(options=options, service=Service(driver))

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Shows a file in a window so wide."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        self.complaints()
        self.window.get(path.resolve().as_uri())
        self.settle()

    def settle(self) -> None:
        """Returns when what was asked for is drawn."""
        self.window.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.window.execute_script(f"return {script}", *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element."""
        return str(self.run("document.querySelector(arguments[0]).textContent", selector))

    def press(self, keys: str) -> None:
        """Presses keys on the timeline, one after another."""
        self.window.find_element("id", "lanes").send_keys(keys)
        self.settle()

    def click(self, name: str) -> None:
        """Clicks an element by its id."""
        self.window.find_element("id", name).click()
        self.settle()

    def point(self, x: float, y: float, click: bool = False) -> None:
        """Moves the pointer to a place on the timeline, in pixels from its upper left corner."""
        from selenium.webdriver.common.action_chains import ActionChains

        canvas = self.window.find_element("id", "lanes")
        # Offsets count from the middle of what is in view.
        self.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
        width, height = canvas.size["width"], canvas.size["height"]
        chain = ActionChains(self.window).move_to_element_with_offset(canvas, int(x - width / 2), int(y - height / 2))
        (chain.click() if click else chain).perform()
        self.settle()

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """What a script returns once that is true."""
        deadline = time.monotonic() + PATIENCE
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings since the last call."""
        return [entry["message"] for entry in self.window.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def close(self) -> None:
        """Ends it."""
        self.window.quit()
