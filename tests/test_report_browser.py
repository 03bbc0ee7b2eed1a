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

SIZES = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The demo, trained for a few steps, with a base to compare with and a step that was skipped."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    words = ["demo", "--steps", "6", "--eval-every", "3", "--samples", "2", "--sample-frames", "60", "--out", folder]
    done = subprocess.run(
        [support.ROOT / "launch.sh", *map(str, words)],
        env=support.environment(AUDIO_FINETUNE_ENV=support.VENV),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    if not (folder / "samples" / "step-00000000").exists():
        shutil.copytree(folder / "samples" / "recorded", folder / "samples" / "step-00000000")
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.open_browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture
def page(run, driver):
    """page(width, dark): the report, as it is after loading."""

    def open_page(width: int = 1280, dark: bool = False, file: Path | None = None):
        browser.complaints(driver)
        browser.set_screen(driver, width, dark=dark)
        driver.get((file or run / "report.html").as_uri())
        browser.wait_for(driver, "return document.querySelector('#chart-loss[data-drawn]')")
        return driver

    return open_page


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_the_page_is_drawn_without_complaints_in_every_size_and_colour(page, width, dark):
    driver = page(width, dark)
    browser.show_all(driver, width, dark)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return document.querySelectorAll('.plot canvas, .plot .bk-Figure').length") >= 8
    red = driver.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) < 60) == dark
    # Charts are as wide as their cards, and the curve is there: some pixel has its colour.
    assert driver.execute_script("return [...document.querySelectorAll('.plot > div')].every(e => e.offsetWidth > 200)")
    assert colours_of(driver, "#chart-loss") >= {"--c0", "--c1"}
    assert browser.complaints(driver) == []


def colours_of(driver, chart: str) -> set[str]:
    """The palette's colours that occur in a chart, read from a screenshot."""
    import io

    import numpy as np
    from PIL import Image
    from selenium.webdriver.common.by import By

    picture = Image.open(io.BytesIO(driver.find_element(By.CSS_SELECTOR, f"{chart} .plot").screenshot_as_png))
    pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(int)
    found = set()
    for name in ("--c0", "--c1", "--c2"):
        script = f"return getComputedStyle(document.documentElement).getPropertyValue('{name}')"
        colour = [int(driver.execute_script(script).strip()[i : i + 2], 16) for i in (1, 3, 5)]
        if (np.abs(pixels - colour).max(axis=1) < 12).sum() > 20:
            found.add(name)
    return found


def test_every_player_loads_and_a_click_on_the_picture_plays(page, driver):
    from selenium.webdriver.common.by import By

    page()
    players = driver.find_elements(By.CSS_SELECTOR, "#samples .card > .sounds audio")
    assert len(players) >= 2 * 3
    for player in players:
        browser.wait_for(driver, "return [...document.querySelectorAll('audio')].every(a => a.readyState >= 1)")
        assert driver.execute_script("return arguments[0].duration", player) > 0.05
    first, second = driver.find_elements(By.CSS_SELECTOR, ".sound .drawn")[:2]
    driver.execute_script("document.querySelector('audio').loop = true")  # does not end by itself
    first.click()
    ended_or_running = "const a = document.querySelectorAll('audio')[{}]; return a.currentTime > 0 && a.played.length"
    browser.wait_for(driver, ended_or_running.format(0))
    assert driver.execute_script("return !document.querySelector('.head').hidden")
    second.click()
    browser.wait_for(driver, ended_or_running.format(1))
    browser.wait_for(driver, "return document.querySelectorAll('audio')[0].paused")  # one at a time
    assert browser.complaints(driver) == []


def test_hovering_shows_the_recorded_values(page, driver, run):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    page()
    plot = driver.find_element(By.CSS_SELECTOR, "#chart-loss .plot")
    ActionChains(driver).move_to_element(plot).perform()
    tip = browser.wait_for(driver, "return document.querySelector('#chart-loss .tip:not([hidden])')?.innerText")
    step = int(tip.split()[1])
    losses = {record["step"]: record["loss"] for record in support.step_records(run)}
    assert 1 <= step <= 6 and "training" in tip and "evaluation" in tip
    shown = next(line for line in tip.splitlines() if line.startswith(f"{losses[step]:.4g}"[:4]))
    assert float(shown) == pytest.approx(losses[step], rel=1e-4)
    ActionChains(driver).move_to_element(driver.find_element(By.TAG_NAME, "h1")).perform()
    browser.wait_for(driver, "return document.querySelector('#chart-loss .tip').hidden")


FIGURES = "return [...Bokeh.index.roots].map(view => view.model).filter(model => model.type === 'Figure')"
RANGES = f"{FIGURES}.map(({{ x_range }}) => [x_range.start, x_range.end])"
SCALES = f"{FIGURES}.map(({{ y_scale }}) => y_scale.type)"


def test_dragging_zooms_all_curves_and_log_scale_applies_to_losses(page, driver):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    page()
    browser.show_all(driver, 1280)
    whole = driver.execute_script(RANGES)
    assert len(whole) >= 8 and len({tuple(one) for one in whole}) == 1 and whole[0][0] < 0 and whole[0][1] > 6
    plot = driver.find_element(By.CSS_SELECTOR, "#chart-loss .plot")
    ActionChains(driver).move_to_element_with_offset(plot, 20, 0).click_and_hold().move_by_offset(
        60, 5
    ).release().perform()
    browser.wait_for(driver, f"{RANGES}.every(([low, high]) => high - low < 4)")
    driver.find_element(By.ID, "reset").click()
    browser.wait_for(driver, f"{RANGES}.every(([low, high]) => low < 0 && high > 6)")
    assert set(driver.execute_script(SCALES)) == {"LinearScale"}
    driver.find_element(By.ID, "log").click()
    browser.wait_for(driver, f"{SCALES}.includes('LogScale')")
    browser.show_all(driver, 1280)
    kinds = driver.execute_script(SCALES)
    assert "LogScale" in kinds and "LinearScale" in kinds and len(kinds) == len(whole)
    driver.find_element(By.CSS_SELECTOR, "#chart-loss .legend button").click()  # hides the training curve
    browser.wait_for(driver, "return document.querySelector('#chart-loss .legend [aria-pressed=false]')")
    assert browser.complaints(driver) == []


def test_the_readmes_picture_is_small_and_shows_page_and_samples(driver, run, tmp_path):
    from PIL import Image

    browser.take_picture(run, tmp_path / "report.png", driver)
    for file in (tmp_path / "report.png", support.ROOT / "docs" / "report.png"):
        assert file.stat().st_size < 200_000 and Image.open(file).width == 1280 and Image.open(file).height > 1000


def test_two_runs_are_compared_on_one_page(page, driver, run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    file = write_page(comparison_page([run, other]), tmp_path / "comparison.html")
    for width in (1280, 390):
        page(width, file=file)
        browser.show_all(driver, width)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return document.querySelectorAll('#chart-loss .legend button').length") == 4
    assert browser.complaints(driver) == []


def test_a_name_from_the_data_cannot_run_in_the_browser(page, driver, run, tmp_path):
    evil = tmp_path / "evil"
    shutil.copytree(run, evil, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    word = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
    with open(evil / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps({"event": "alarm", "step": 6, "message": word}) + "\n")
        stream.write(json.dumps({"step": 7, "loss": 1.0, word: 1.0, f"loss_channel_{word}": 2.0}) + "\n")
    facts = evil / "samples" / "recorded" / "clip-0000.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"speaker": word}))
    page(file=write_page(report_page(evil), evil / "report.html"))
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.show_all(driver, 1280)
    assert driver.title == "dia_lora: evil" and word in driver.find_element("id", "warnings").text
    # Even what would get past the escaping is not run.
    driver.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", word)
    browser.wait_for(driver, "return document.querySelector('img[src=x]').complete")
    assert driver.title == "dia_lora: evil" and any(
        "Content Security Policy" in text for text in browser.complaints(driver)
    )


def test_the_live_page_follows_the_run(driver, run, tmp_path):
    from selenium.webdriver.common.by import By

    growing = tmp_path / "growing"
    shutil.copytree(run, growing, ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "export"))
    lines = (growing / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 4)
    (growing / "metrics.jsonl").write_text("".join(lines[:half]))
    server = make_server(growing, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.set_screen(driver, 1280)
        driver.get(f"http://127.0.0.1:{server.server_port}/")
        browser.wait_for(driver, "return document.body.dataset.live === 'connected'")
        browser.wait_for(driver, "return document.querySelector('#chart-loss[data-drawn]')")
        browser.complaints(driver)  # a favicon that is not there
        assert "not finished" in driver.find_element(By.ID, "top").text
        driver.execute_script("window.sameDocument = true; document.querySelector('#evaluations details').open = true")
        (growing / "metrics.jsonl").write_text("".join(lines))
        browser.wait_for(driver, "return document.getElementById('top').innerText.includes('finished')"
                         " && !document.getElementById('top').innerText.includes('not finished')")  # fmt: skip
        browser.wait_for(driver, f"{RANGES}.every(([low, high]) => high > 6)")
        assert driver.execute_script(
            "return window.sameDocument && document.querySelector('#evaluations details').open"
        )
        assert browser.complaints(driver) == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    browser.wait_for(driver, "return document.getElementById('foot').innerText.includes('not live any more')")
