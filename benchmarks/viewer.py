"""Measure the viewer in headless Chromium with many episodes: the index, the first paint, filters, pages.

    PYTHONPATH=tests:tests/reporting .venv/bin/python benchmarks/viewer.py [EPISODES]

The episodes are one evaluation whose lines vary a real one. The first page, Runs, requests the results with intervals,
which are computed beside the rest. Prints seconds, medians and the slowest of REPEATS.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from test_viewer_browser import Browser, start_driver
from viewer_cases import make_run

from saccade.reporting.viewer.library import Library
from saccade.reporting.viewer.results import ResultsWorker
from saccade.reporting.viewer.server import ViewerServer

REPEATS = 7
COLORS = ("red", "green", "blue", "cyan", "purple", "yellow")
CONTROLS = {  # the control of the page, the event that applies it, and the values that alternate
    "verdict": ("select[name=verdict]", "change", ("right", "wrong")),
    "tool errors": ("select[name=errors]", "change", ("yes", "no")),
    "least reward": ("input[aria-label='Least reward']", "change", ("0.3", "0.7")),
    "text, with the pause after typing": ("input[type=search]", "input", ("cyan 77", "green 5")),
    "order": ("select[aria-label=Order]", "change", ("reward", "-calls")),
}
MEASURE = """
const [selector, event, value, done] = arguments;
const body = document.querySelector("tbody"), before = body.dataset.request, start = performance.now();
const control = document.querySelector(selector);
control.value = value;
control.dispatchEvent(new Event(event, { bubbles: true }));
(function wait() {
  if (body.dataset.request === before) setTimeout(wait, 2);
  else requestAnimationFrame(() => done(performance.now() - start));
})();
"""


def write_episodes(folder: Path, count: int) -> None:
    """Write an evaluation of `count` lines that vary the first line of another one."""
    line = (folder / "evaluations" / "before.jsonl").read_text().splitlines()[0]
    with (folder / "evaluations" / "many.jsonl").open("w") as file:
        for number in range(count):
            record = json.loads(line)
            task = record["outcome"]["episode"]["task"]
            task["id"] = f"many-{number}"
            task["question"] = f"When is {COLORS[number % 6]} shown for the {number % 977}th time?"
            record["outcome"]["score"] |= {"value": number % 101 / 100, "correct": float(number % 3 == 0)}
            file.write(json.dumps(record) + "\n")


def main() -> None:
    """Measure and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_run(Path(temporary) / "runs" / "a")
        write_episodes(folder, count)
        worker = ResultsWorker()
        library = Library([folder], compute=worker.run)
        start = time.perf_counter()
        library.refresh()
        print(f"index of {count:,} episodes: {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        library.refresh()
        print(f"index, nothing new: {time.perf_counter() - start:.3f} s")
        server = ViewerServer(library, on_stop=worker.close)
        threading.Thread(target=server.run, daemon=True).start()
        driver = start_driver(Path(temporary) / "browser")
        browser = Browser(driver, server.address)
        driver.set_script_timeout(60)
        paints, rows = [], []
        for _ in range(REPEATS):
            driver.get("about:blank")
            driver.get(f"{browser.origin}#/episodes?run=a")
            browser.wait_for("tbody tr")
            paints.append(browser.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            entry = "return performance.getEntriesByType('resource').filter((e) => e.name.includes('api/episodes'))[0]"
            rows.append(browser.run(f"{entry}.responseEnd"))
        report("first paint", paints)
        report("first rows received", rows)
        for title, (selector, event, values) in CONTROLS.items():
            browser.open("benchmarks?run=a")
            browser.open("episodes?run=a&stage=many")
            browser.wait_for("select[name=stage]")
            times = [
                driver.execute_async_script(MEASURE, selector, event, values[number % len(values)])
                for number in range(REPEATS)
            ]
            report(f"filter, {title}", times)
        driver.quit()
        server.stop()


def report(title: str, milliseconds: list[float]) -> None:
    """Print the median and the slowest."""
    print(f"{title}: {median(milliseconds):.0f} ms, slowest {max(milliseconds):.0f} ms", flush=True)


if __name__ == "__main__":
    main()
