"""A real browser for tests: Chromium without a window, with what it said and asked for."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A fresh profile and nothing that would go to the network by itself.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


def is_there() -> bool:
    """Whether Chromium, its driver and selenium are installed."""
    programs = all(shutil.which(name) for name in ("chromium", "chromedriver"))
    return programs and importlib.util.find_spec("selenium") is not None


class Browser:
    """One window."""

    def __init__(self, driver: Any):
        self._driver = driver

    def open(self, path: Path, *, width: int, scheme: str) -> None:
        """Shows a file in a window of this width, for a reader who prefers this scheme."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wish = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})
        self._driver.get(path.resolve().as_uri())

    def run(self, script: str) -> Any:
        """What a script returns that is run in the page."""
        return self._driver.execute_script(script)

    def said(self) -> list[str]:
        """What stands in the console since the last look."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requested(self) -> list[str]:
        """Every address asked for since the last look."""
        messages = (json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance"))
        return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in this folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get("about:blank")
        driver.get_log("performance")  # of the page that a new browser opens by itself
        yield Browser(driver)
    finally:
        driver.quit()
