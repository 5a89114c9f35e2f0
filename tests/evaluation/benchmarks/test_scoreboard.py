"""The benchmark report of a run: complete in three formats, hostile text inert, published values with sources."""

import itertools
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest
from test_benchmark_result import NASTY, build_result, build_scored, results_file, some

from saccade.evaluation.benchmark_result import read_benchmark_results, write_benchmark_result
from saccade.metrics.tables import escape_markdown
from saccade.reporting.benchmark_report import (
    COMPARABILITY_WARNING,
    REFERENCE_SCORES_FILE,
    build_evaluation_tables,
    build_overview_tables,
    get_reference_scores,
    write_benchmark_report,
)
from saccade.reporting.plots import Point, plot_points
from saccade.reporting.report import Plot
from saccade.types import EpisodeStatus, Usage

VARIANTS = [
    *((name, {}) for name in ("longvideobench", "lvbench", "mlvu", "mmvu", "charades_sta", "vsibench", "vstar")),
    *((name, {}) for name in ("mathverse", "mathvision", "wemath", "dynamath", "tirbench", "videomme")),
    *(("hrbench", {"size": size}) for size in ("4k", "8k")),
    ("videomme", {"subtitles": True}),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run with three evaluations, one of them with hostile text only."""
    folder = tmp_path_factory.mktemp("scores") / "run <b>"
    for at, name in enumerate(("videomme", "vsibench")):
        benchmark, tasks = some(name, folder / "copies" / name, 24)
        usage = Usage(
            unsampled_tokens=900 + at * 20_000, sampled_tokens=50, visual_tokens=800 + at * 19_000, seconds=2.0
        )
        scored = [
            build_scored(task, str(task.ground_truth) if i % 4 else "no", calls=1, usage=usage)
            for i, task in enumerate(tasks)
        ]
        write_benchmark_result(
            results_file(folder, name), build_result(benchmark, scored, conditions={"temperature": "0.7", NASTY: NASTY})
        )
    nasty = [
        build_scored(
            hostile(task),
            NASTY,
            end=EpisodeStatus.ABORTED if i % 2 else EpisodeStatus.ANSWERED,
            error=NASTY if i % 2 else None,
        )
        for i, task in enumerate(tasks)
    ]
    write_benchmark_result(results_file(folder, "vsibench, hostile"), build_result(benchmark, nasty))
    write_benchmark_report(folder, metadata={NASTY: NASTY})
    return folder


def hostile(task):
    return type(task)(
        id=NASTY + task.id,
        question=NASTY,
        media=task.media,
        answer_type=task.answer_type,
        ground_truth=task.ground_truth,
        extras={**task.extras, "dataset": NASTY},
    )


class Reader(HTMLParser):
    VOID = frozenset({"meta", "br", "path", "use"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs


@pytest.mark.slow
def test_the_page_is_well_formed_and_hostile_text_stays_text(run):
    text = (run / "evaluations" / "benchmarks.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert not reader.open
    assert not {"script", "img", "link", "iframe"} & reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "&lt;script&gt;alert" in text
    assert "{{ 7*7 }}" in text


@pytest.mark.slow
def test_report_contents_in_all_formats(run):
    place = run / "evaluations"
    whole = json.loads((place / "benchmarks.json").read_text())
    result = whole["evaluations"]["videomme"]
    low, high = result["intervals"]["accuracy"]
    score = result["metrics"]["accuracy"]
    assert score == pytest.approx(75)
    assert low < score < high
    assert result["costs"]["visual_tokens"] == 800
    page, text = ((place / f"benchmarks.{end}").read_text(encoding="utf-8") for end in ("html", "md"))
    for value in (f"{score:.2f}", f"{low:.2f}, {high:.2f}", "ParaVT-8B", "62.1", "errors", "unparsed", "text tokens"):
        assert value in page, value
        assert value in text, value
    assert "<svg" in page
    assert (place / "benchmarks.png").read_bytes().startswith(b"\x89PNG")
    assert "| temperature | 0.7 |" in text
    assert COMPARABILITY_WARNING in text
    assert "videomme, by duration" in page


@pytest.mark.slow
def test_report_shows_samples_judge_and_errors(tmp_path):
    benchmark, tasks = some("vstar", tmp_path / "copy", 6)
    scored = [build_scored(task, "A") for task in tasks]
    scored += [build_scored(task, "", end=EpisodeStatus.ABORTED, error="the <disk> is gone") for task in tasks]
    result = build_result(benchmark, scored, judge="a <judge>")
    assert result.at_k.keys() == {"avg@2", "pass@2"}
    write_benchmark_result(results_file(tmp_path, "vstar_twice"), result)
    page = write_benchmark_report(tmp_path).read_text(encoding="utf-8")
    text = (tmp_path / "evaluations" / "benchmarks.md").read_text(encoding="utf-8")
    for whole in (page, text):
        for value in (*result.at_k, f"{result.at_k['pass@2']:.2f}", "a &lt;judge&gt;", "the &lt;disk&gt; is gone"):
            assert value in whole, value
    own = build_evaluation_tables("vstar_twice", result, {})
    assert dict(own[1].rows)["answers"] == "12"
    assert dict(own[1].rows)["errors, counted as wrong"] == "6"
    assert ("avg@2", f"{result.at_k['avg@2']:.2f}") in own[0].rows


@pytest.mark.slow
def test_every_row_of_a_table_has_as_many_cells_as_its_header(run):
    results = read_benchmark_results(run)
    others = {result.benchmark: get_reference_scores(result.benchmark) for result in results.values()}
    grids = build_overview_tables(results, others)
    for grid in [
        *grids,
        *(grid for name, result in results.items() for grid in build_evaluation_tables(name, result, others)),
    ]:
        assert {len(row) for row in grid.rows} == {len(grid.header)}, grid.title
    lines = (run / "evaluations" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 20
    for before, line in itertools.pairwise(tables):
        if line.startswith("| ---"):
            assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", before))


@pytest.mark.parametrize("text", [NASTY, "a|b", "[x](javascript:alert(1))", "![x](http://x)", "line\nline", "\\|"])
def test_text_in_markdown_is_inert(text):
    escaped = escape_markdown(text)
    assert "\n" not in escaped
    assert "<" not in escaped
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]]", escaped)


@pytest.mark.slow
def test_reference_scores_name_existing_metrics(tmp_path):
    known = 0
    for at, (name, settings) in enumerate(VARIANTS):
        benchmark, tasks = some(name, tmp_path / str(at), 30, **settings)
        found = get_reference_scores(benchmark.name)
        metrics = build_result(benchmark, [build_scored(task, "x") for task in tasks[:3]]).metrics
        assert {reference.metric for reference in found} <= metrics.keys()
        assert all(0 < reference.value < 100 and "arXiv" in reference.source for reference in found)
        assert len({(reference.metric, reference.model) for reference in found}) == len(found)
        known += len(found)
    assert known == len(json.loads(REFERENCE_SCORES_FILE.read_text())["values"])


@pytest.mark.slow
def test_points_share_a_color_by_group():
    def point(x, group="a", name="a"):
        return Point(name=name, group=group, x=x, y=40.0, low=30.0, high=50.0)

    assert plot_points([], x_label="tokens", y_label="%") is None
    points = [point(0.0), point(9.0, "b", "<b>$x$"), point(1e6, "a")]
    plot = Plot(title="", draw=partial(plot_points, points, x_label="tokens", y_label="%"))
    svg = plot.encode("svg").decode()
    assert "<b>" not in svg
    assert svg.count("#d55e00") < svg.count("#0072b2")
    assert plot_points([point(0.0)], x_label="tokens", y_label="%") is not None
