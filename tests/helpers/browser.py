"""A real browser for the tests of the report: Debian's Chromium, without a screen, driven by selenium."""

import shutil
import time
from contextlib import contextmanager
from importlib.util import find_spec

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --mute-audio"
    " --disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
).split()
PATIENCE = 60  # seconds, for a machine that is busy


def missing() -> str:
    """Why there is no browser, and how to get one; empty if there is one."""
    absent = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    absent += [] if find_spec("selenium") else ["selenium"]
    if not absent:
        return ""
    return f"{', '.join(absent)} not installed: ./launch.sh setup --with-browser installs a browser (Debian, as root)"


@contextmanager
def open_browser(folder):
    """`folder`: an empty one for the browser's own files."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS, f"--user-data-dir={folder}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def set_screen(driver, width: int, height: int = 900, dark: bool = False) -> None:
    colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def wait_for(driver, script: str):
    """The first answer of `script` that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := driver.execute_script(script)):
        assert time.monotonic() < deadline, script
        time.sleep(0.1)
    return answer


def complaints(driver) -> list[str]:
    """What the page wrote to the console since the last call, above the level of information."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] not in ("INFO", "DEBUG")]
