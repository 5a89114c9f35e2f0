"""Comparisons of evaluations: pairs, tables and reports."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from error_cases import raises
from evaluation_cases import make_scored, task
from matplotlib.figure import Figure

from saccade.errors import DataError
from saccade.evaluation.compare import (
    ANSWER_NOT_SHOWN,
    ANSWER_SHOWN,
    Evaluation,
    classify_overview,
    compare_evaluations,
    read_evaluations,
)
from saccade.evaluation.records import Record, read_records
from saccade.reporting.evaluation_report import build_tables
from saccade.reporting.report import Plot, Report, ReportSection, format_markdown, write_markdown
from saccade.reporting.run_report import build_results, summarize_findings, write_report
from saccade.reporting.run_summary import summarize_run
from saccade.types import Task, UngradedEpisode
from saccade.utils.jsonl import to_jsonable, write_jsonl

TASKS = [task(f"w-{i}", ground_truth=("red", "blue", "red")[i % 3]) for i in range(12)]


def evaluation(right, **more):
    return Evaluation(scored=[make_scored(task, float(i < right), **more) for i, task in enumerate(TASKS)])


def as_markdown(comparison):
    return format_markdown(Report(kind="run", title="run", sections=tuple(build_results(comparison))))


EVALUATIONS = {
    "after SFT": replace(evaluation(3), fingerprint="weights=sft, tools=on"),
    "after RL": replace(evaluation(11, calls=2), fingerprint="weights=rl, tools=on"),
    "no tools": replace(evaluation(4, times=(5.0,)), fingerprint="weights=rl, tools=off", use_tools=False),
}


def test_default_pairs():
    changes = {(change.before, change.after): change for change in compare_evaluations(EVALUATIONS).changes}
    assert set(changes) == {
        ("no tools", "after RL"),
        ("after SFT", "after RL"),
        ("after SFT", "no tools"),
    }
    gain = changes["after SFT", "after RL"]
    assert gain.difference.mean == pytest.approx(8 / 12)
    assert gain.difference.is_significant
    assert not changes["after SFT", "no tools"].difference.is_significant


def test_classify_overview_of_images():
    plain, known = make_scored(TASKS[0], 1.0), []
    for looks in ([], [0, 2]):
        extras = {"question": "count", "cards": [[32, 32, 32, "red", "dot", "blue"]], "looks": looks}
        episode = replace(plain.episode, task=replace(TASKS[0], extras=extras))
        known.append(classify_overview(replace(plain, episode=episode)))
    assert known == [ANSWER_SHOWN, ANSWER_NOT_SHOWN]


@pytest.mark.slow
def test_chosen_pairs_and_pairs_without_a_shared_task():
    other = {"a": EVALUATIONS["after SFT"], "b": Evaluation(scored=[make_scored(task("else"), 1.0)])}
    assert compare_evaluations(other).changes == ()
    chosen = compare_evaluations(EVALUATIONS, pairs=[("after RL", "after SFT")]).changes
    assert [change.after for change in chosen] == ["after SFT"]


def test_accuracy_is_split_by_whether_the_overview_shows_the_answer():
    summaries = compare_evaluations(EVALUATIONS).summaries
    assert [row.name for row in summaries["after RL"].slices["overview"]] == ["not shown"]
    assert [row.name for row in summaries["no tools"].slices["overview"]] == ["shown"]


def test_constant_baseline_of_synthetic_tasks_only():
    assert compare_evaluations(EVALUATIONS).summaries["after RL"].constant_baseline == pytest.approx(8 / 12)
    plain = Task(id="p", question="?", media=(), answer_type=TASKS[0].answer_type, ground_truth="red")
    found = compare_evaluations({"p": Evaluation(scored=[make_scored(plain, 1.0)])}).summaries["p"]
    assert found.constant_baseline is None
    assert found.slices["overview"] == ()


def test_the_comparison_is_plain_json_and_readable_markdown():
    found = compare_evaluations(EVALUATIONS)
    assert to_jsonable(found)["summaries"]["after RL"]["accuracy"]["n"] == 12
    text = as_markdown(found)
    assert "| accuracy | 0.25 \\[0.02, 0.55\\] | 0.92 \\[0.66, 1.00\\] | 0.33 \\[0.08, 0.63\\] |" in text
    assert "| after RL − after SFT | +0.67" in text
    assert "n=12" in text


def test_the_head_is_about_the_newest_evaluation_with_tools():
    comparison = compare_evaluations(EVALUATIONS)
    found = summarize_findings([], EVALUATIONS, comparison)
    assert found["Result"].startswith("after RL: accuracy 0.92")
    controls = {"no tools": EVALUATIONS["no tools"]}
    assert summarize_findings([], controls, compare_evaluations(controls))["Result"].startswith("no tools")


def test_every_row_of_a_table_has_as_many_cells_as_its_header():
    for grid in build_tables(compare_evaluations(EVALUATIONS)):
        assert {len(row) for row in grid.rows} == {len(grid.header)}, grid.title


def test_names_do_not_break_the_table():
    assert "a\\|b" in as_markdown(compare_evaluations({"a|b": evaluation(2)}))


def test_an_empty_evaluation_is_an_error():
    with raises(DataError, key="evaluations", value="nothing"):
        compare_evaluations({"nothing": Evaluation(scored=[])})


def keep(folder, *names):
    (folder / "evaluations").mkdir()
    for name in names:
        rows = [
            Record(task=scored.episode.task.digest, frame_budget=4, sample_index=0, fingerprint="u", outcome=scored)
            for scored in evaluation(2).scored
        ]
        write_jsonl(folder / "evaluations" / f"{name}.jsonl", rows)


def test_evaluations_of_a_run_are_read_by_name(tmp_path):
    with raises(DataError, key=str(tmp_path)):
        read_evaluations(tmp_path)
    keep(tmp_path, "b first", "a second")
    found = read_evaluations(tmp_path)
    assert set(found) == {"a second", "b first"}
    assert [episode.score for episode in found["b first"].scored] == [episode.score for episode in evaluation(2).scored]
    media = {scored.episode.task.media[0].path for scored in found["b first"].scored}
    assert str(tmp_path / "evaluations" / "w-0.mp4") in media  # resolved relative to the file


@pytest.mark.slow
def test_evaluations_are_ordered_by_what_they_evaluated_not_by_the_times_of_their_files(tmp_path):
    recorded = {"z": "", "b": "sft/step-000010", "a": "rl/step-000020", "c": "rl/step-000100", "d": "model"}
    named = ["after_rl_greedy", "after_sft_greedy", "test_rl_step-000020", "world"]  # files of earlier versions
    order = ["d", "world", "z", "b", "after_sft_greedy", "a", "test_rl_step-000020", "c", "after_rl_greedy"]
    keep(tmp_path, *recorded, *named)
    for name, checkpoint in recorded.items():
        path = tmp_path / "evaluations" / f"{name}.jsonl"
        write_jsonl(path, [replace(record, checkpoint=checkpoint) for record in read_records(path)])
    assert list(read_evaluations(tmp_path)) == order
    for age, name in enumerate(order):
        os.utime(tmp_path / "evaluations" / f"{name}.jsonl", (1_000_000 - age, 1_000_000 - age))
    copy = shutil.copytree(tmp_path, tmp_path / "copy")
    assert list(read_evaluations(tmp_path)) == list(read_evaluations(copy)) == order
    assert list(summarize_run(copy, lambda folder: False).evaluations) == order
    (copy / "evaluations" / "a.jsonl").write_text("{damaged")
    assert sorted(summarize_run(copy, lambda folder: False).evaluations) == sorted(order)


@pytest.mark.slow
def test_ungraded_episodes_are_counted(tmp_path):
    keep(tmp_path, "graded", "partly")
    path = tmp_path / "evaluations" / "partly.jsonl"
    known = read_records(path)
    lost = [
        UngradedEpisode(episode=record.outcome.episode, group_index=0, reason="the judge timed out")
        for record in known[:3]
    ]
    write_jsonl(path, [replace(record, outcome=new) for record, new in zip(known, lost, strict=False)] + known[3:])
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| ungraded | 0 | 3 |" in text
    assert f"/ {len(TASKS) - 3} |" in text
    numbers = json.loads((tmp_path / "comparison.json").read_text())["summaries"]
    assert {name: numbers[name]["ungraded"] for name in numbers} == {"graded": 0, "partly": 3}
    assert "ungraded" not in as_markdown(compare_evaluations(EVALUATIONS))


def test_report_formats(tmp_path):
    keep(tmp_path, "after SFT", "after RL")
    page = write_report(tmp_path, metadata={"recipe": "tiny/base"})
    assert "tiny/base" in page.read_text()
    assert "### Changes" in (tmp_path / "report.md").read_text()
    assert set(json.loads((tmp_path / "comparison.json").read_text())["summaries"]) == {"after SFT", "after RL"}


def list_images(page):
    """Return the titles and the paths of a Markdown file's images."""
    return re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text())


def test_a_markdown_report_has_its_plots_beside_it(tmp_path):
    tasks = [
        replace(item, extras={**item.extras, "question": ("count", "when")[i % 2]}) for i, item in enumerate(TASKS)
    ]
    scored = [make_scored(item, float(i < 5)) for i, item in enumerate(tasks)]
    comparison = compare_evaluations({name: Evaluation(scored=scored) for name in ("before", "after")})
    report = Report(kind="run", title="run", sections=tuple(build_results(comparison)))
    page = tmp_path / "a report.md"
    (tmp_path / "a report_plots").mkdir()
    (tmp_path / "a report_plots" / "07.png").touch()  # of an earlier report
    write_markdown(report, page)
    assert list_images(page) == [("Question type", "a%20report_plots/00.png")]
    assert [path.name for path in (tmp_path / "a report_plots").iterdir()] == ["00.png"]
    assert (tmp_path / "a report_plots" / "00.png").read_bytes().startswith(b"\x89PNG")


def test_the_plots_of_a_section_are_numbered_over_the_report(tmp_path):
    plots = [Plot(title=f"plot {i}", draw=lambda i=i: Figure() if i else None, has_title=i == 2) for i in range(3)]
    sections = (ReportSection(title="a", plots=tuple(plots[:2])), ReportSection(title="b", plots=tuple(plots[2:])))
    page = write_markdown(Report(kind="run", title="run", sections=sections), tmp_path / "r.md", "plots")
    assert list_images(page) == [("plot 1", "plots/01.png"), ("plot 2", "plots/02.png")]
    assert "### plot 1" in page.read_text()
    assert "### plot 2" not in page.read_text()  # the drawing has the title
