"""The viewer in a real browser: every page without errors, filters, keys, the video, hostile text, accessibility."""

import contextlib
import gzip
import json
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chat_server import server as serve_chat
from code_cases import PLOT, make_code_run
from page_cases import decode
from viewer_cases import make_run, write_benchmark

pytest.importorskip("selenium", reason="selenium is missing: scripts/bootstrap --dev installs it")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from saccade.media.cache import CachingMediaLoader
from saccade.reporting.viewer.export import export_run
from saccade.reporting.viewer.library import Library
from saccade.reporting.viewer.server import ViewerServer
from saccade.runs.view import build_questions

pytestmark = pytest.mark.slow
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("chromium or chromedriver is missing: scripts/bootstrap --browser installs it", allow_module_level=True)

WAIT_SECONDS = 120
AXE_FOLDER = Path(__file__).parents[2] / ".browser"
OPTIONS = (
    "--headless",
    "--window-size=1280,900",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
)
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    '<a href="javascript:window.hacked = 1">x</a>\x1b[31mred\u202egnp.exe\u2066 '
)
PAGES = (
    *("runs", "runs?run=a&stage=rl", "episodes?run=a", "step?run=a", "step?run=a&stage=rl&step=2", "compare?run=a"),
    *("compare?run=a&first=a:%20before&second=a:%20after", "benchmarks?run=a", "episode?run=a&ref=rl/3/0/1"),
)
# The titles of charts with ink in the leftmost pixels: a label that is wider than its axis is cut there.
CUT_LABELS = """return [...document.querySelectorAll(".chart")].filter((chart) => {
    const canvas = chart.querySelector("canvas");
    return canvas?.getContext("2d").getImageData(0, 0, 1, canvas.height).data.some((value) => value > 0);
}).map((chart) => chart.querySelector("figcaption").textContent)"""
LOOKS = [(width, theme) for width in (1280, 390) for theme in ("light", "dark")]


class Browser:
    """A browser on a viewer, with what the tests do in it."""

    def __init__(self, driver, address):
        self.driver, self.origin = driver, address.split("?")[0]
        driver.get(address)
        self.wait_for("main[data-ready]")

    def wait_until(self, condition):
        return WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.1).until(lambda _: condition())

    def wait_for(self, selector):
        self.wait_until(lambda: self.find_all(selector))
        return self.find_all(selector)[0]

    def find_all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def open(self, page):
        if self.driver.current_url.split("#")[0] != self.origin:  # another test has left the driver elsewhere
            self.driver.get(self.origin)
            self.wait_for("main[data-ready]")
            self.list_errors()  # of the page that was left, whose server may be gone
        before = self.find_all("main")[0].get_attribute("data-ready")
        if self.run("return location.hash") == f"#/{page}":
            return
        self.run("location.hash = arguments[0]", f"/{page}")
        self.wait_until(lambda: self.find_all("main")[0].get_attribute("data-ready") not in (before, None))

    def press(self, key):
        self.driver.switch_to.active_element.send_keys(key)

    def drop(self, path, element):
        """Drag a file from outside of the browser and drop it on an element."""
        box = self.run("const b = arguments[0].getBoundingClientRect(); return [b.x, b.y, b.width, b.height]", element)
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        where = {"x": box[0] + box[2] / 2, "y": box[1] + box[3] / 2, "data": data}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.driver.execute_cdp_cmd("Input.dispatchDragEvent", {"type": kind, **where})

    def resize(self, width):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def set_theme(self, theme):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def list_errors(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def list_hosts(self):
        """Return the hosts of all requests since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        addresses = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return {urlsplit(address).hostname for address in addresses if not address.startswith(("data:", "chrome"))}


def find_problems(browser, page):
    """Return the serious findings of axe at each width and in each theme, and pages that are wider than the window."""
    problems = {}
    for width, theme in LOOKS:
        browser.resize(width)
        browser.set_theme(theme)
        if browser.run("return document.documentElement.scrollWidth") > width:
            problems[f"{page} at {width}"] = "wider than the window"
        if found := run_axe(browser):
            problems[f"{page} at {width}, {theme}"] = found
    browser.resize(1280)
    browser.set_theme("light")
    return problems


def run_axe(browser):
    """Return the serious findings of axe."""
    files = list(AXE_FOLDER.glob("axe-*.min.js"))
    if not files:
        pytest.fail("axe-core is missing: scripts/bootstrap --browser installs it")
    browser.run(files[0].read_text())
    return browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run({resultTypes: ['violations']}).then((r) => done(r.violations"
        ".filter((v) => ['serious', 'critical'].includes(v.impact))"
        ".map((v) => [v.id, v.nodes.map((n) => n.html + n.failureSummary).slice(0, 2)])))"
    )


def start_driver(profile):
    options = webdriver.ChromeOptions()
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "a", hostile=HOSTILE)
    write_benchmark(folder, "videomme", 8, hostile=HOSTILE)
    write_benchmark(folder, "videomme_no_tools", 5)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    driver = start_driver(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@contextlib.contextmanager
def serve(driver, library, questions=None):
    """Serve a library, and open its first page."""
    library.refresh()
    server = ViewerServer(library, questions=questions)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield Browser(driver, server.address)
    finally:
        server.stop()
        thread.join(WAIT_SECONDS)


@pytest.fixture(scope="module")
def browser(folder, driver):
    with serve(driver, Library([folder], load_decoder=lambda folder: decode)) as browser:
        yield browser


def test_every_page_at_both_widths_and_in_both_themes(browser):
    problems = {}
    for page in PAGES:
        browser.open(page)
        browser.wait_for("main h1")
        problems |= find_problems(browser, page)
    assert not problems, json.dumps(problems, indent=1)
    assert browser.list_errors() == []
    assert browser.list_hosts() == {"127.0.0.1"}
    assert "token" not in browser.driver.current_url


def test_benchmarks_have_intervals_strata_published_rows_and_failures_first(browser):
    browser.open("benchmarks?run=a")
    shown = browser.run("return document.querySelector('main').innerText")
    for text in ("66.67 [", "videomme_no_tools", "short", "long", "Published by others", "Cost per question"):
        assert text in shown, text
    assert len(browser.find_all(".track")) == 2
    for summary in browser.find_all("main details summary"):
        summary.click()
    table = browser.find_all("section[aria-label=videomme] table")[-1]
    kinds = [row.find_elements(By.TAG_NAME, "td")[0].text for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert kinds == sorted(kinds, key=["unparsed", "wrong", "right"].index)
    assert "<script>window.hacked = 1</script>" in table.text
    assert browser.run("return window.hacked === undefined")
    problems = find_problems(browser, "benchmarks with its folded tables")
    assert not problems, json.dumps(problems, indent=1)


def test_curves_and_tables_of_a_run(browser):
    browser.open("runs?run=a&stage=rl")
    browser.wait_for(".chart canvas")
    browser.wait_until(lambda: "Accuracy" in browser.run("return document.querySelector('main').innerText"))
    charts = browser.find_all(".chart")
    for chart in charts:  # each is drawn when it comes into view, one of equal values, too
        browser.run("arguments[0].scrollIntoView()", chart)
    browser.wait_until(lambda: len(browser.find_all(".chart canvas")) == len(charts))
    titles = [chart.find_element(By.TAG_NAME, "figcaption").text for chart in charts]
    assert {"Importance weights trainer / engine", "Throughput tokens per second"} <= set(titles)  # with long labels
    assert browser.run(CUT_LABELS) == []
    browser.run("document.querySelector('.chart').dataset.old = 1")
    browser.set_theme("dark")
    browser.wait_until(lambda: not browser.find_all(".chart[data-old]"))  # drawn again in its colors
    browser.set_theme("light")
    assert browser.list_errors() == []


def test_filters_keys_and_deep_links(browser):
    browser.open("episodes?run=a")
    count = len(browser.find_all("tbody tr"))
    browser.press("/")
    browser.driver.switch_to.active_element.send_keys("blue")
    browser.wait_until(lambda: len(browser.find_all("tbody tr")) == 2)
    assert "text=blue" in browser.run("return location.hash")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.open("episodes?run=a&stage=before&verdict=right")
    assert len(browser.find_all("tbody tr")) == 3 < count
    browser.press("j")
    browser.press("j")
    second = browser.wait_for("tr.selected").get_attribute("data-row")
    browser.press(Keys.ENTER)
    browser.wait_for(".conversation")
    assert second.replace("/", "%2F") in browser.run("return location.hash")
    browser.press("n")
    browser.wait_until(lambda: "at=2" in browser.run("return location.hash"))
    browser.press("p")
    browser.wait_until(lambda: "at=1" in browser.run("return location.hash"))


@pytest.mark.parametrize("page", ["episodes", "step", "benchmarks", "compare"])
def test_a_link_to_what_is_gone_says_so(browser, page):
    gone = "first=gone:%20before" if page == "compare" else "run=gone"
    browser.open(f"{page}?{gone}&text=<b>")
    assert "there is no " in browser.wait_for("[role=alert]").text
    assert "gone" in browser.find_all("[role=alert]")[0].text
    assert not browser.find_all("tbody tr")


@pytest.mark.parametrize("gone", ["stage=gone", "stage=rl&step=9999"])
def test_a_link_to_a_step_that_is_gone_says_so(browser, gone):
    browser.open(f"step?run=a&{gone}")
    assert "a has no episodes of " in browser.wait_for("[role=alert]").text
    assert gone.rpartition("=")[2] in browser.find_all("[role=alert]")[0].text


def test_a_window_seeks_the_video_and_frames_enlarge(browser):
    browser.open("episode?run=a&ref=rl/2/0/1")
    browser.wait_until(lambda: browser.run("return document.querySelector('video').readyState >= 1"))
    assert round(browser.run("return document.querySelector('video').duration")) == 64
    browser.run("document.querySelector('video').currentTime = 30")
    browser.wait_for(".timeline .window").click()
    browser.wait_until(lambda: browser.run("return document.querySelector('video').currentTime") == 0)
    assert browser.find_all("#call-0-0.current")
    browser.find_all(".tick")[1].click()
    browser.wait_until(lambda: browser.run("return document.querySelector('video').currentTime") == 24)
    browser.find_all(".frame")[1].click()
    browser.wait_until(lambda: browser.run("return document.querySelector('dialog img').naturalWidth") == 32)
    browser.press(Keys.ESCAPE)
    browser.wait_until(lambda: not browser.find_all("dialog"))
    assert browser.list_errors() == []


def test_tokens_and_reasons_of_an_episode(browser):
    browser.open("episode?run=a&ref=rl/2/0/1")
    assert "answer 'red' is episode 1" in browser.wait_for(".score .reason").text
    browser.wait_for(".tokens summary").click()
    browser.wait_for(".token")
    for mode in ("logprob", "entropy", "advantage", "logprob_diff"):
        browser.run(
            "const s = document.querySelector('.tokens select'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change'))",
            mode,
        )
        assert browser.find_all(".token.warm, .token.cool"), mode
    browser.run("document.querySelector('.tokens select').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    first = browser.run("return [...document.querySelectorAll('.token')].indexOf(document.activeElement)")
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    second = browser.run("return [...document.querySelectorAll('.token')].indexOf(document.activeElement)")
    assert (first, second) == (0, 1)
    status = browser.wait_for(".token-status").text
    for name in ("logprob", "entropy", "engine–trainer logprob difference", "advantage", "weight version 3"):
        assert name in status
    problems = find_problems(browser, "tokens")
    assert not problems, json.dumps(problems, indent=1)
    assert browser.list_errors() == []


def test_a_step_shows_groups_and_advantages(browser):
    browser.open("step?run=a&stage=rl&step=2")
    browser.wait_until(lambda: browser.find_all(".chip small"))
    groups = [row.text for row in browser.find_all("tbody tr")]
    assert len(groups) == 2
    assert "reward_std" in groups[1]
    browser.press("n")
    browser.wait_until(lambda: "step=3" in browser.run("return location.hash"))


def test_a_comparison_shows_flipped_tasks_and_both_episodes(browser):
    browser.open("compare?run=a&first=a:%20before&second=a:%20after")
    assert "right → wrong" in browser.find_all(".list tbody tr")[0].text
    browser.wait_for("button.link").click()
    browser.wait_until(lambda: len(browser.find_all(".pair > section")) == 2)
    assert browser.find_all(".pair mark")
    problems = find_problems(browser, "a pair of episodes")
    assert not problems, json.dumps(problems, indent=1)


@pytest.mark.parametrize("wrong", ["reward_min=x", "verdict=maybe", "offset=-1", "step=1.5", "sort=reward;"])
def test_a_link_with_a_wrong_filter_says_so(browser, wrong):
    browser.open(f"episodes?run=a&{wrong}")
    assert f"{wrong.partition('=')[0]} must be " in browser.wait_for("[role=alert]").text
    assert browser.find_all("main h1")


def test_a_run_of_another_version_says_what_cannot_be_shown(driver, tmp_path):
    folder = make_run(tmp_path / "old", num_steps=2)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rl:", "rl:\n  group_count: 3", 1))
    (folder / "evaluations" / "before.jsonl").write_text("{}\n")
    (folder / "evaluations" / "videomme.benchmark_result.json").write_text("{}\n")
    with serve(driver, Library([folder])) as browser:
        browser.list_errors()
        browser.open("runs?run=old&stage=rl")
        browser.wait_until(lambda: len(browser.find_all("[role=alert]")) == 2)
        shown = read_main(browser)
        assert "group_count" in shown
        assert "before.jsonl" in shown
        assert "Accuracy" in shown  # of the other evaluation
        browser.wait_for(".chart canvas")
        browser.open("step?run=old&stage=rl&step=2")
        browser.wait_until(lambda: "Advantages can't be shown" in read_main(browser))
        assert len(browser.find_all("tbody tr")) == 2
        browser.open("benchmarks?run=old")
        assert "videomme.benchmark_result.json" in browser.wait_for("[role=alert]").text
        assert browser.find_all("select[aria-label=Run]")
        for page in ("episodes?run=old", "compare?run=old"):
            browser.open(page)
            browser.wait_for("main h1")
            assert not browser.find_all("[role=alert]")
        assert all("409" in error for error in browser.list_errors())


def break_metrics(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 3, "rew')


def break_a_metrics_line(folder):
    path = folder / "metrics.jsonl"
    path.write_text('{"stage": "rl", "st\n' + path.read_text())


def break_an_episode(folder):
    path = next(folder.glob("episodes/*.gz"))
    lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join([b'{"stage": "rl", "gr\n', *lines[1:]])))


def break_a_compressed_file(folder):
    path = next(folder.glob("episodes/*.gz"))
    path.write_bytes(path.read_bytes()[:-200])


def add_a_key(folder):
    path = folder / "recipe.yaml"
    path.write_text(path.read_text().replace("rl:", "rl:\n  group_count: 3", 1))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_metrics, ""),  # a kill truncates the last line
        (break_a_metrics_line, "metrics.jsonl"),
        (break_an_episode, "a line can't be read"),
        (break_a_compressed_file, "jsonl.gz"),
        (add_a_key, "group_count"),
    ],
)
def test_a_damaged_run_is_shown_in_part_with_the_reason(driver, tmp_path, damage, reason):
    folder = make_run(tmp_path / "a", num_steps=2)
    damage(folder)
    with serve(driver, Library([folder])) as browser:
        browser.list_errors()
        browser.open("runs?run=a")
        browser.wait_until(lambda: "Versions and times" in read_main(browser))
        assert reason in read_main(browser)
        assert "Accuracy" in read_main(browser)
        if damage is not break_a_metrics_line:
            browser.wait_for(".chart canvas")
        browser.open("episodes?run=a")
        assert len(browser.find_all("tbody tr")) > 12  # the evaluations, and what can be read of the steps
        browser.open("episode?run=a&ref=rl/2/0/1")
        browser.wait_for(".conversation")
        for page in ("step?run=a&stage=rl&step=2", "compare?run=a", "benchmarks?run=a"):
            browser.open(page)
            browser.wait_for("main h1")
            assert read_main(browser)
        # Chromium itself logs the answers that say why a part can't be shown.
        assert [error for error in browser.list_errors() if " 409 " not in error] == []


def test_a_run_that_loses_its_recipe_is_no_run_any_more(driver, tmp_path):
    folder = make_run(tmp_path / "a", num_steps=1)
    library = Library([tmp_path])
    with serve(driver, library) as browser:
        browser.list_errors()
        browser.open("episodes?run=a")
        (folder / "recipe.yaml").unlink()
        browser.open("step?run=a")
        assert "there is no run a" in browser.wait_for("[role=alert]").text
        browser.open("runs")
        browser.wait_until(lambda: "a run is a folder with a recipe.yaml" in read_main(browser))
        assert browser.list_errors() == []


def test_a_page_that_was_left_delays_no_other(driver, tmp_path):
    folder, may_end = make_run(tmp_path / "a", num_steps=1), threading.Event()

    def compute(function, *arguments):
        may_end.wait(WAIT_SECONDS)
        return function(*arguments)

    try:
        with serve(driver, Library([folder], compute=compute)) as browser:
            for _ in range(7):  # a browser opens six connections
                browser.open("runs?run=a")
                browser.wait_until(lambda: "Computing the results of a" in read_main(browser))
                browser.open("episodes?run=a")
                browser.wait_for("tbody tr")
            browser.open("runs?run=a")
            may_end.set()
            browser.wait_until(lambda: "Versions and times" in read_main(browser))
            assert "Computing" not in read_main(browser)
            assert browser.list_errors() == []
    finally:
        may_end.set()


def test_hostile_text_is_text(browser):
    browser.open("episodes?run=a&task=hostile")
    browser.wait_for("tbody tr a").click()
    browser.wait_for(".conversation")
    shown = browser.run("return document.querySelector('main').textContent")
    assert "<script>window.hacked = 1</script>" in shown
    assert not {"\x1b", "\u202e", "\u2066"} & set(shown)
    assert len(shown) < 100_000  # a megabyte is shown on demand
    browser.wait_for("button.more").click()
    browser.wait_until(lambda: browser.run("return document.querySelector('main').textContent.length") > 900_000)
    assert browser.run(
        "return window.hacked === undefined && !document.querySelector('main script, a[href^=javascript]')"
    )
    assert browser.list_errors() == []
    assert browser.list_hosts() <= {"127.0.0.1"}


def test_code_its_output_and_its_figures_are_visible(driver, renderer, tmp_path):
    """A rollout in the real sandbox: code, printed text, a traceback, and a figure that opens at its full size."""
    folder = tmp_path / "code"
    ref = make_code_run(folder, renderer)
    library = Library([folder])
    with serve(driver, library) as browser:
        browser.list_errors()
        browser.open(f"episode?run=code&ref={ref}")
        browser.wait_for(".conversation")
        replies, calls = browser.find_all(".turn > .reply"), browser.find_all(".call")
        assert (len(replies), len(calls)) == (4, 3)
        assert all(line in replies[0].text for line in PLOT.splitlines())
        plotted, failed, shown = calls
        assert plotted.find_element(By.CSS_SELECTOR, ".result").text == "128 frames, <b>0</b> to 126"
        printed, error = failed.find_elements(By.CSS_SELECTOR, ".result")  # in the order in which the model reads them
        assert printed.text == "so far"
        assert error.text.endswith("IndexError: list index out of range")
        assert "failed" in failed.get_attribute("class").split()
        assert len(shown.find_elements(By.CSS_SELECTOR, ".figure img")) == 3
        (figure,) = plotted.find_elements(By.CSS_SELECTOR, ".figure img")
        size = "return [arguments[0].naturalWidth, arguments[0].naturalHeight]"
        for width in (1280, 390):
            browser.resize(width)
            browser.run("arguments[0].scrollIntoView()", figure)
            browser.wait_until(lambda: browser.run(size, figure)[0] > 0)
            assert figure.is_displayed()
            assert figure.size["width"] > 280
        browser.resize(1280)
        pixels = browser.run(size, figure)
        figure.click()
        browser.wait_until(lambda: browser.run(size, browser.find_all("dialog img")[0]) == pixels)
        assert browser.find_all("dialog img")[0].size["width"] >= 600
        assert f"{pixels[0]}×{pixels[1]} pixels" in browser.find_all("dialog")[0].text
        browser.press(Keys.ESCAPE)
        problems = find_problems(browser, "an episode with code")
        assert not problems, json.dumps(problems, indent=1)
        assert browser.list_errors() == []
    page = tmp_path / "page.html"
    page.write_text(export_run(library, "code", CachingMediaLoader().load_pixels).text)
    browser = Browser(driver, page.as_uri())
    browser.open(f"episode?run=code&ref={ref}")
    browser.wait_until(lambda: browser.run(size, browser.wait_for(".figure img"))[0] == 480)


def test_an_exported_page_works_from_a_file(driver, folder, tmp_path):
    library = Library([folder])
    library.refresh()
    exported = export_run(library, "a", CachingMediaLoader().load_pixels)
    page = tmp_path / "a page.html"
    page.write_text(exported.text)
    browser = Browser(driver, page.as_uri())
    browser.list_errors()
    browser.driver.get_log("performance")
    browser.driver.refresh()
    browser.wait_for("main[data-ready]")
    for name in ("runs?run=a&stage=rl", "step?run=a", "compare?run=a", "benchmarks?run=a", "episodes?run=a"):
        browser.open(name)
        browser.wait_for("main h1")
        assert not browser.find_all("[role=alert]"), name
    count = len(browser.find_all("tbody tr"))
    assert f"{count} of {count} episodes" in exported.note
    browser.open("episodes?run=a&verdict=right&stage=before")
    assert len(browser.find_all("tbody tr")) == 3
    browser.wait_for("tbody tr a").click()
    browser.wait_for(".conversation")
    browser.wait_until(lambda: browser.run("return document.querySelector('.frame img').naturalWidth") > 0)
    browser.press("n")
    browser.wait_until(lambda: "at=1" in browser.run("return location.hash"))
    browser.open("episodes?run=a&task=hostile")
    browser.wait_for("tbody tr a").click()
    browser.wait_for("button.more")
    shown = browser.run("return document.querySelector('main').textContent")
    assert "<script>window.hacked = 1</script>" in shown
    assert browser.run("return window.hacked === undefined && !document.querySelector('main script')")
    assert browser.list_errors() == []
    assert browser.list_hosts() <= {None}  # the file itself


def test_an_exported_page_keeps_to_its_size(folder):
    library = Library([folder])
    library.refresh()
    load_pixels = CachingMediaLoader().load_pixels
    whole = export_run(library, "a", load_pixels)
    limit = len(whole.text) - 4000
    small = export_run(library, "a", load_pixels, max_bytes=limit)
    assert len(small.text.encode()) <= limit
    assert small.note != whole.note  # fewer episodes have a page


@contextlib.contextmanager
def open_ask_page(driver, questions):
    """Serve the page Ask alone, and open it."""
    with serve(driver, Library([]), questions) as browser:
        browser.list_errors()
        browser.wait_until(lambda: "Ask" in browser.find_all("nav")[0].text)
        browser.open("ask")
        yield browser


def read_main(browser):
    return browser.run("return document.querySelector('main').innerText")


def test_a_page_asks_a_server(driver, folder):
    """Replies, calls and results of sub-agents are shown while the server still holds the last reply back."""
    arguments = '{"start_time": %d, "end_time": %d, "question": "Dark?"}'
    call = f'<tool_call>{{"name": "crop_video", "arguments": {arguments}}}</tool_call>'
    may_end = threading.Event()

    def reply(number, body):
        roles = [message["role"] for message in body["messages"]]
        if "Which one" not in json.dumps(body):  # of a sub-agent
            return "it is <i>dark</i>"
        if "assistant" not in roles:
            return f"<think>I look.</think>{call % (0, 16)}{call % (32, 48)}"
        assert may_end.wait(WAIT_SECONDS)
        return "<think>I know.</think><answer>the <b>second</b></answer>"

    with serve_chat(reply) as served, open_ask_page(driver, build_questions(served.url)) as browser:
        browser.wait_for("input[type=file]").send_keys(str(next((folder / "media").iterdir())))
        browser.wait_for("textarea").send_keys("Which one?")
        browser.wait_for("button[type=submit]").click()
        browser.wait_until(lambda: len(browser.find_all(".call.ok")) == 2)
        shown = read_main(browser)
        assert "<think>I look.</think>" in shown
        assert shown.count("it is <i>dark</i>") == 2
        assert not browser.find_all(".timeline")
        may_end.set()
        browser.wait_for(".timeline")
        assert "the <b>second</b>" in read_main(browser)
        assert len(browser.find_all(".timeline .window")) == 2
        browser.wait_until(lambda: browser.run("return document.querySelector('video').readyState >= 1"))
        browser.find_all(".timeline .window")[1].click()
        browser.wait_until(lambda: browser.run("return document.querySelector('video').currentTime") == 32)
        assert browser.find_all("#call-0-1.current")
        child = browser.find_all(".child")[0]
        child.find_element(By.TAG_NAME, "summary").click()
        browser.wait_until(lambda: child.find_element(By.CSS_SELECTOR, ".nested .reply").is_displayed())
        assert "it is <i>dark</i>" in child.find_element(By.CSS_SELECTOR, ".nested .reply").text
        assert len(child.find_elements(By.CSS_SELECTOR, ".frame")) == 16
        assert len(served.bodies) == 4
        problems = find_problems(browser, "ask a server")
        assert not problems, json.dumps(problems, indent=1)
        assert browser.list_errors() == []


def test_a_dropped_file_is_asked_about(driver, folder):
    """A file that is dropped beside its box doesn't replace the page; the answer stays when the theme changes."""
    clip = next((folder / "media").iterdir())
    replies = "<think>I look.</think><answer>brighter</answer>"
    with (
        serve_chat(lambda number, body: replies) as served,
        open_ask_page(driver, build_questions(served.url)) as browser,
    ):
        browser.wait_for("textarea").send_keys("What happens?")
        browser.drop(clip, browser.wait_for("h1"))
        assert "Drop a video" in browser.wait_for(".drop").text
        browser.drop(clip, browser.wait_for(".drop"))
        assert clip.name in browser.wait_for(".drop [role=status]").text
        assert browser.find_all("textarea")[0].get_attribute("value") == "What happens?"
        browser.wait_for("button[type=submit]").click()
        browser.wait_for(".timeline")
        assert "brighter" in browser.wait_for(".answers").text
        browser.wait_until(lambda: browser.run("return document.querySelector('video').readyState >= 1"))
        assert browser.run("return document.querySelector('video').duration") == pytest.approx(64, abs=0.5)
        assert len(served.bodies) == 1
        for width in (1280, 390):
            browser.resize(width)
            assert not browser.run("const s = document.querySelector('.side'); return s.scrollWidth > s.clientWidth")
        browser.resize(1280)
        browser.set_theme("dark")
        background = "return getComputedStyle(document.body).backgroundColor"
        browser.wait_until(lambda: browser.run(background) == "rgb(19, 22, 25)")
        assert "brighter" in browser.wait_for(".answers").text
        browser.set_theme("light")
        assert browser.list_errors() == []


def test_a_page_asks_a_server_that_fails(driver, folder):
    settings = ["engine.settings.max_retries=0"]
    with serve_chat(lambda number, body: (500, "<b>no</b>")) as served:
        questions = build_questions(served.url, settings=settings)
    with open_ask_page(driver, questions) as browser:
        browser.wait_for("input[type=file]").send_keys(str(next((folder / "media").iterdir())))
        browser.wait_for("textarea").send_keys("Which one?")
        browser.wait_for("button[type=submit]").click()
        assert f"{served.url} can't be reached" in browser.wait_for("[role=alert]").text
        browser.wait_until(lambda: browser.find_all("button[type=submit]")[0].is_enabled())


def test_a_page_asks_a_model(driver, folder, tiny_folder, tmp_path):
    """A picked clip is sent, the events arrive as they happen, and the finished episode has frames and a time line."""
    with open_ask_page(driver, build_questions(tiny_folder)) as browser:
        clip = next((folder / "media").iterdir())
        browser.wait_for("input[type=file]").send_keys(str(clip))
        browser.wait_for("textarea").send_keys("What is it? <b>")
        browser.wait_for("button[type=submit]").click()
        browser.wait_for(".timeline")
        assert browser.find_all(".conversation .turn")
        assert "What is it? <b>" in browser.find_all("main")[0].text
        browser.wait_until(lambda: browser.run("return document.querySelector('.frame img').naturalWidth") > 0)
        browser.wait_until(lambda: browser.run("return document.querySelector('video').readyState >= 1"))
        browser.wait_for(".tick").click()
        browser.wait_until(lambda: browser.run("return document.querySelector('video').currentTime") > 0)
        text = tmp_path / "text.txt"
        text.write_text("no video")
        browser.find_all("input[type=file]")[0].send_keys(str(text))
        browser.wait_for("button[type=submit]").click()
        assert "text.txt" in browser.wait_for("[role=alert]").text
        problems = find_problems(browser, "ask")
        assert not problems, json.dumps(problems, indent=1)
        assert len([error for error in browser.list_errors() if "400" not in error]) == 0
