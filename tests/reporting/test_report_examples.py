"""The episodes of reports: one choice and one rule in HTML, Markdown and PDF, of one and of several runs."""

import html
import re
import shutil
import zlib

import pytest
from commands import good
from page_cases import NASTY, example
from viewer_cases import make_run, write_evaluation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Two runs with an evaluation of the same 40 tasks: run a is right on the even ones, run b on none."""
    return [make_evaluated_run(tmp_path_factory.mktemp("evaluated") / name) for name in ("a", "b")]


def make_evaluated_run(folder):
    make_run(folder, num_steps=1)
    (clip,) = (folder / "media").iterdir()
    write_evaluation(folder, "after", [build_example(folder.name, number, str(clip)) for number in range(40)])
    return folder


def build_example(run, number, clip):
    is_right = run == "a" and number % 2 == 0
    return example(
        name=f"w-{number}",
        path=clip,
        accuracy=float(is_right),
        answer="red" if is_right else f"blue {NASTY}" if number == 1 else "blue",
        error="the engine stopped" if number % 10 == 9 else None,
    )


def read_text(page):
    """Return the text of a report without white space; of a PDF, that which its page streams show."""
    if page.suffix == ".pdf":
        streams = re.findall(rb"stream\r?\n(x.*?)endstream", page.read_bytes(), re.DOTALL)
        contents = [data for data in map(zlib.decompress, streams) if b" Tf" in data]
        shown = b"".join(part for data in contents for part in re.findall(rb"\(((?:[^()\\]|\\.)*)\)", data))
        text = re.sub(rb"\\(.)", rb"\1", shown).decode("latin-1")
    else:
        text = html.unescape(page.read_text()).replace("\\", "").replace("*", "")
    return "".join(text.split())


def list_tasks(text):
    """Return the tasks of the examples, in order."""
    return re.findall(r'(?:class="id">|task:?)(w-\d+)[<(]', text)


@pytest.mark.parametrize("count", [1, 2])
def test_every_format_shows_the_same_examples_and_their_rule(evaluated, tmp_path, count):
    tasks = {}
    for ending in ("html", "md", "pdf"):
        page = tmp_path / f"report.{ending}"
        good("report", *evaluated[:count], "-o", page)
        text = read_text(page)
        tasks[ending] = list_tasks(text)
        for part in (
            "12 of 40 episodes of" if count == 1 else "6 of 40 episodes of",
            "types take turns",
            "What?",
            "the engine stopped",  # a failed one
            "accuracy 1.00",
            "start_time=0.0, end_time=8.0",
            "start_time must be a number",  # the result of a call
        ):
            assert "".join(part.split()) in text, f"{ending}: {part}"
    assert tasks["html"] == tasks["md"] == tasks["pdf"]
    assert len(tasks["md"]) == 12
    if count == 2:
        assert "otheranswers:b:blue" in read_text(tmp_path / "report.md")
    assert len(list(tmp_path.glob("report_plots/*.jpg"))) == 12
    assert (tmp_path / "report.md").read_text().count(".jpg)") == 12


def test_examples_without_their_videos_are_text(tmp_path):
    folder = make_evaluated_run(tmp_path / "a")
    shutil.rmtree(folder / "media")
    for ending in ("md", "pdf"):
        good("report", folder, "-o", tmp_path / f"report.{ending}")
        assert len(list_tasks(read_text(tmp_path / f"report.{ending}"))) == 12
    assert not list(tmp_path.glob("report_plots/*.jpg"))
