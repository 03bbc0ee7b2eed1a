"""A real browser for the tests of the report: Debian's Chromium, without a screen, driven by selenium."""

import io
import shutil
import tempfile
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

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


def set_screen(driver, width: int, height: int = 900, dark: bool = False, zoom: float = 1) -> None:
    colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colours]})
    size = {"width": width, "height": height, "deviceScaleFactor": zoom, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def show_all(driver, width: int, dark: bool = False) -> int:
    """Makes the screen as high as the page, so that every chart is drawn; returns that height."""
    height = driver.execute_script("return document.documentElement.scrollHeight")
    set_screen(driver, width, height, dark)
    wait_for(driver, "return !document.querySelector('.curves:not(details .curves) .chart:not([data-drawn])')")
    return height


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


def take_picture(run: Path, file: Path, driver, width: int = 1280, colours: int = 160) -> None:
    """The top of a run's report, down to its first sample; few colours make a small file."""
    from PIL import Image

    from common.report import report_page

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(report_page(run), encoding="utf-8")
        set_screen(driver, width)
        driver.get(page.as_uri())
        wait_for(driver, "return document.querySelector('#chart-loss[data-drawn]')")
        show_all(driver, width)
        wait_for(driver, "return [...document.images].every(image => image.complete)")
        wait_for(driver, "return [...document.querySelectorAll('audio')].every(audio => audio.readyState >= 1)")
        end = "(document.querySelector('.card') ?? document.querySelector('.curves')).getBoundingClientRect().bottom"
        bottom = driver.execute_script(f"return {end} + scrollY")
        picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).crop((0, 0, width, round(bottom) + 12))
    picture.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(file, optimize=True)
