"""The report of a real run in a real browser: it is drawn, it can be used, and it sounds."""

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from common.report import comparison_page, report_page, write_page
from helpers import browser, support
from infer.watch import make_server

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())]

FIGURES = "[...Bokeh.documents[0].roots()]"
RANGES = f"{FIGURES}.map(({{ x_range }}) => [x_range.start, x_range.end])"
# Every figure is as wide as its box.
DRAWN = f"""return window.Bokeh && Bokeh.documents.length && {FIGURES}.length >= 6
    && [...document.querySelectorAll('.plot')].every(plot => plot.firstChild?.offsetWidth > 200)"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The demo, trained for a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    words = ["demo", "--steps", "6", "--eval-every", "3", "--samples", "2", "--out", folder]
    done = subprocess.run(
        [support.ROOT / "launch.sh", *map(str, words)],
        env=support.environment(AUDIO_FINETUNE_ENV=support.VENV),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.open_browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def page(run, driver):
    """page(width, dark, file): the report, as it is after loading."""

    def open_page(width: int = 1280, dark: bool = False, file: Path | None = None):
        browser.complaints(driver)
        browser.set_screen(driver, width, dark=dark)
        driver.get((file or run / "report.html").as_uri())
        browser.wait_for(driver, DRAWN)

    return open_page


def copy(run: Path, folder: Path, *left_out: str) -> Path:
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", *left_out))
    return folder


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_the_page_is_drawn_without_complaints_in_every_size_and_colour(page, driver, width, dark):
    page(width, dark)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    red = driver.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 60) == dark
    assert "#1f77b4" in colours_of(driver, "#chart-loss")  # the first colour of bokeh's palette
    assert browser.complaints(driver) == []


def colours_of(driver, place: str) -> set[str]:
    """The colours of a part of the screen."""
    import io

    from PIL import Image
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.CSS_SELECTOR, place)
    picture = Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")
    return {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in picture.getcolors(picture.width * picture.height)}


def test_every_player_loads_and_a_click_on_the_picture_plays(page, driver):
    from selenium.webdriver.common.by import By

    page()
    assert len(driver.find_elements(By.CSS_SELECTOR, "#samples audio")) >= 2 * 2
    browser.wait_for(driver, "return [...document.querySelectorAll('audio')].every(a => a.duration > 0.05)")
    driver.execute_script("document.querySelectorAll('audio').forEach(a => { a.loop = true; })")
    first, second = driver.find_elements(By.CSS_SELECTOR, ".drawn")[:2]
    first.click()
    playing = "const a = document.querySelectorAll('audio')[{}]; return a.currentTime > 0 && !a.paused"
    browser.wait_for(driver, playing.format(0))
    browser.wait_for(driver, "return parseFloat(document.querySelector('.head').style.left) > 0")
    second.click()
    browser.wait_for(driver, playing.format(1))
    browser.wait_for(driver, "return document.querySelector('audio').paused")  # one at a time
    assert browser.complaints(driver) == []


def test_dragging_zooms_all_curves(page, driver):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    page()
    whole = driver.execute_script(f"return {RANGES}")
    assert len({tuple(one) for one in whole}) == 1 and whole[0][0] <= 0 and whole[0][1] >= 6
    plot = driver.find_element(By.ID, "chart-loss")
    driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", plot)
    chain = ActionChains(driver).move_to_element_with_offset(plot, 20, 30).click_and_hold()
    for _ in range(6):  # as a hand does: bokeh takes one jump for a click
        chain.move_by_offset(10, 1).pause(0.05)
    chain.release().perform()
    browser.wait_for(driver, f"return {RANGES}.every(([low, high]) => high - low < 4)")
    assert browser.complaints(driver) == []


def test_two_runs_are_compared_on_one_page(page, driver, run, tmp_path):
    file = write_page(comparison_page([run, copy(run, tmp_path / "other")]), tmp_path / "comparison.html")
    for width in (1280, 390):
        page(width, file=file)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(f"return {FIGURES}[0].above.find(panel => panel.items).items.length") == 4
    assert browser.complaints(driver) == []


def test_a_name_from_the_data_cannot_run_in_the_browser(page, driver, run, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    evil = copy(run, tmp_path / "evil")
    word = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    with open(evil / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps({"event": "alarm", "step": 6, "message": word}) + "\n")
        stream.write(json.dumps({"step": 3, "loss": 1.0, f"loss_{word}": 2.0}) + "\n")
    facts = evil / "samples" / "recorded" / "clip-0000.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"speaker": word}))
    page(file=write_page(report_page(evil), evil / "report.html"))
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert word in driver.find_element(By.ID, "warnings").text
    plot = driver.find_element(By.ID, "chart-terms")
    driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", plot)
    ActionChains(driver).move_to_element(plot).perform()  # the tooltip has the name
    assert driver.title == "dia_lora: evil" and not driver.find_elements(By.CSS_SELECTOR, "img[src=x]")
    # Even what would get past the escaping is not run.
    driver.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", word)
    browser.wait_for(driver, "return document.querySelector('img[src=x]').complete")
    assert driver.title == "dia_lora: evil"
    assert any("Content Security Policy" in text for text in browser.complaints(driver))


def test_the_live_page_follows_the_run(driver, run, tmp_path):
    from selenium.webdriver.common.by import By

    growing = copy(run, tmp_path / "growing", "export")
    lines = (growing / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Scores come whenever they are ready; a new chart loads the page anew.
    lines = [line for line in lines if json.loads(line).get("event") not in ("scores", "ceiling")]
    half = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 4)
    (growing / "metrics.jsonl").write_text("".join(lines[:half]))
    server = make_server(growing, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.set_screen(driver, 1280)
        driver.get(f"http://127.0.0.1:{server.server_port}/")
        browser.wait_for(driver, "return document.body.dataset.live === 'connected'")
        browser.wait_for(driver, DRAWN)
        browser.complaints(driver)  # a favicon that is not there
        assert "not finished" in driver.find_element(By.ID, "top").text
        driver.execute_script("window.sameDocument = true; document.querySelector('#details details').open = true")
        (growing / "metrics.jsonl").write_text("".join(lines))
        browser.wait_for(driver, "return !document.getElementById('top').innerText.includes('not finished')")
        browser.wait_for(driver, f"return {RANGES}.every(([low, high]) => high >= 6)")
        assert driver.execute_script("return window.sameDocument && document.querySelector('#details details').open")
        assert browser.complaints(driver) == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    browser.wait_for(driver, "return document.getElementById('foot').innerText.includes('not live any more')")
