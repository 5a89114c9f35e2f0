"""Write the screenshots of docs/view: `.venv/bin/python scripts/screenshots.py RUN`.

It serves a run of `saccade demo tiny/para_grpo`, opens its pages in headless Chromium (`scripts/bootstrap --browser`)
and saves each as a PNG of 256 colors. The picture of benchmarks is of other runs and stays.
"""

import io
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from saccade.reporting.viewer.library import Library
from saccade.reporting.viewer.server import ViewerServer
from saccade.runs.view import build_questions, is_running, load_decoder

FOLDER = Path(__file__).parents[1] / "docs" / "view"
WAIT_SECONDS = 90
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
EVALUATION = "after_rl_greedy"
QUESTION = "How many flashes?"


class Photographer:
    """A browser on a viewer."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        driver.get(address)
        self.wait_for("main[data-ready]")

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """Return the first true value of a condition."""
        return WebDriverWait(self.driver, WAIT_SECONDS).until(lambda _: condition())

    def find_all(self, selector: str) -> list[Any]:
        """Return the elements of a selector."""
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def wait_for(self, selector: str) -> Any:
        """Return the first element of a selector, when there is one."""
        return self.wait_until(lambda: self.find_all(selector))[0]

    def open(self, page: str, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Open a page in a window of this size; wait for its pictures."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        before = self.find_all("main")[0].get_attribute("data-ready")
        self.driver.execute_script("location.hash = arguments[0]", f"/{page}")
        self.wait_until(lambda: self.find_all("main")[0].get_attribute("data-ready") not in (before, None))
        self.wait_for_pictures()

    def wait_for_pictures(self) -> None:
        """Wait until no picture loads; those out of sight are not loaded."""
        script = "return [...document.images].filter((i) => !i.complete && i.loading !== 'lazy').length"
        self.wait_until(lambda: self.driver.execute_script(script) == 0)
        time.sleep(2)  # curves, lazy frames and the video's first frame have no event

    def save(self, name: str) -> None:
        """Save what the window shows."""
        image = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        path = FOLDER / f"{name}.png"
        colors = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
        colors.save(path, optimize=True)
        sys.stdout.write(f"{path}: {image.width}x{image.height}, {path.stat().st_size / 1000:.0f} kB\n")


def find_episode(library: Library, run: str) -> str:
    """Return the newest evaluation's first right episode with four or more calls."""
    _, rows = library.get(run).index.list_episodes({"stage": EVALUATION, "verdict": "right"}, limit=500)
    return next(row["ref"] for row in rows if row["calls"] >= 4)


def take_pictures(camera: Photographer, run: str, ref: str, video: Path) -> None:
    """Save every picture."""
    camera.open(f"runs?run={run}&stage=rl")
    camera.wait_for(".chart canvas")
    camera.wait_for_pictures()
    camera.save("runs")
    camera.open(f"step?run={run}&stage=rl", theme="dark")
    camera.wait_for(".chip small")
    camera.save("step")
    camera.open(f"episode?run={run}&ref={ref}")
    seek(camera)
    camera.save("episode")
    camera.open("runs")
    camera.open(f"episode?run={run}&ref={ref}", width=390, height=844)
    seek(camera)
    camera.save("phone")
    camera.open("ask", height=1100)
    camera.wait_for("input[type=file]").send_keys(str(video.resolve()))
    camera.wait_for("textarea").send_keys(QUESTION)
    camera.wait_for("button[type=submit]").click()
    camera.wait_for(".timeline, [role=alert]")
    camera.wait_for_pictures()
    seek(camera)
    camera.driver.execute_script("scrollTo(0, 0)")
    camera.save("ask")


def seek(camera: Photographer) -> None:
    """Seek the video to the second call, if there is one."""
    camera.wait_until(lambda: camera.driver.execute_script("return document.querySelector('video').readyState >= 2"))
    if windows := camera.find_all(".timeline .window"):
        camera.driver.execute_script("arguments[0].click()", windows[min(1, len(windows) - 1)])
    time.sleep(1)
    camera.driver.execute_script("scrollTo(0, 0)")


def main(folder: Path) -> None:
    """Serve the run and save the pictures."""
    library = Library([folder], load_decoder=load_decoder, is_running=is_running)
    library.refresh()
    name = folder.resolve().name
    server = ViewerServer(library, questions=build_questions(str(folder)))
    threading.Thread(target=server.run, daemon=True).start()
    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory() as profile:
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver") or ""))
        try:
            video = next((folder / "data" / "test" / "clips").glob("*.mp4"))
            take_pictures(Photographer(driver, server.address), name, find_episode(library, name), video)
        finally:
            driver.quit()
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
