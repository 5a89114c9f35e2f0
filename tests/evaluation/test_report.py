"""Comparisons: what is compared with what, and how it reads."""

import json
from dataclasses import replace

import pytest
from evaluation_cases import scored, task

from saccade.data.record import write_jsonl
from saccade.errors import DataError
from saccade.evaluation.report import (
    HIDES,
    SHOWS,
    compare,
    grids,
    markdown,
    read_evaluations,
    shown_by_overview,
    write_report,
)
from saccade.evaluation.run import Record, read_records
from saccade.types import Task, Unscored

TASKS = [task(f"w-{i}", gold=("red", "blue", "red")[i % 3]) for i in range(12)]


def evaluation(right, **more):
    return [scored(each, float(i < right), **more) for i, each in enumerate(TASKS)]


EVALUATIONS = {
    "after SFT": evaluation(3),
    "after RL": evaluation(11, calls=2),
    "after RL, tools off": evaluation(4, times=(5.0,)),
}


def test_each_is_compared_with_the_first_and_with_its_control():
    changes = {(each.before, each.after): each for each in compare(EVALUATIONS).changes}
    assert set(changes) == {
        ("after RL, tools off", "after RL"),
        ("after SFT", "after RL"),
        ("after SFT", "after RL, tools off"),
    }
    gain = changes["after SFT", "after RL"]
    assert gain.difference.mean == pytest.approx(8 / 12)
    assert gain.clear
    assert not changes["after SFT", "after RL, tools off"].clear


def test_of_pictures_it_is_known_whether_the_overview_was_enough():
    plain, known = scored(TASKS[0], 1.0), []
    for looks in ([], [0, 2]):
        extras = {"question": "count", "cards": [[32, 32, 32, "red", "dot", "blue"]], "looks": looks}
        episode = replace(plain.episode, task=replace(TASKS[0], extras=extras))
        known.append(shown_by_overview(replace(plain, episode=episode)))
    assert known == [SHOWS, HIDES]


@pytest.mark.slow
def test_pairs_can_be_chosen_and_those_without_a_common_task_are_left_out():
    other = {"a": EVALUATIONS["after SFT"], "b": [scored(task("else"), 1.0)]}
    assert compare(other).changes == ()
    chosen = compare(EVALUATIONS, pairs=[("after RL", "after SFT")]).changes
    assert [each.after for each in chosen] == ["after SFT"]


def test_accuracy_is_split_by_whether_the_overview_shows_the_answer():
    summaries = compare(EVALUATIONS).summaries
    assert [row.name for row in summaries["after RL"].slices["overview"]] == ["not shown"]
    assert [row.name for row in summaries["after RL, tools off"].slices["overview"]] == ["shown"]


def test_floors_are_those_of_the_world_and_unknown_elsewhere():
    assert compare(EVALUATIONS).summaries["after RL"].floor == pytest.approx(8 / 12)
    plain = Task(id="p", question="?", media=(), kind=TASKS[0].kind, gold="red")
    found = compare({"p": [scored(plain, 1.0)]}).summaries["p"]
    assert found.floor is None
    assert found.slices["overview"] == ()


def test_the_comparison_is_plain_json_and_readable_markdown():
    found = compare(EVALUATIONS)
    assert json.loads(json.dumps(found.as_dict()))["summaries"]["after RL"]["accuracy"]["n"] == 12
    text = markdown(found)
    assert "| accuracy | 0.25 \\[0.00, 0.50\\] | 0.92 \\[0.75, 1.00\\] | 0.33 \\[0.08, 0.58\\] |" in text
    assert "| after RL − after SFT | +0.67" in text
    assert "n=12" in text


def test_every_row_of_a_table_has_as_many_cells_as_its_header():
    for grid in grids(compare(EVALUATIONS)):
        assert {len(row) for row in grid.rows} == {len(grid.header)}, grid.title


def test_names_do_not_break_the_table():
    assert "a\\|b" in markdown(compare({"a|b": evaluation(2)}))


def test_an_empty_evaluation_is_an_error():
    with pytest.raises(DataError, match="'nothing' holds no episode"):
        compare({"nothing": []})


def keep(folder, *names):
    (folder / "evaluations").mkdir()
    for name in names:
        rows = [
            Record(task=each.episode.task.digest, frames=4, repeat=0, under="u", scored=each) for each in evaluation(2)
        ]
        write_jsonl(folder / "evaluations" / f"{name}.jsonl", rows)


def test_evaluations_of_a_run_are_read_by_name(tmp_path):
    with pytest.raises(DataError, match="holds no evaluation"):
        read_evaluations(tmp_path)
    keep(tmp_path, "b first", "a second")
    found = read_evaluations(tmp_path)
    assert set(found) == {"a second", "b first"}
    assert [each.score for each in found["b first"]] == [each.score for each in evaluation(2)]
    media = {each.episode.task.media[0].path for each in found["b first"]}
    assert str(tmp_path / "evaluations" / "w-0.mp4") in media  # as seen from the file


@pytest.mark.slow
def test_attempts_that_nobody_could_grade_are_counted_beside_the_means(tmp_path):
    keep(tmp_path, "graded", "partly")
    path = tmp_path / "evaluations" / "partly.jsonl"
    known = read_records(path)
    lost = [Unscored(episode=each.scored.episode, index=0, reason="the judge is away") for each in known[:3]]
    write_jsonl(path, [replace(each, scored=new) for each, new in zip(known, lost, strict=False)] + known[3:])
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| ungraded | 0 | 3 |" in text
    assert f"/ {len(TASKS) - 3} |" in text
    numbers = json.loads((tmp_path / "comparison.json").read_text())["summaries"]
    assert {name: numbers[name]["ungraded"] for name in numbers} == {"graded": 0, "partly": 3}
    assert "ungraded" not in markdown(compare(EVALUATIONS))


def test_a_run_is_reported_as_page_text_and_numbers(tmp_path):
    keep(tmp_path, "after SFT", "after RL")
    page = write_report(tmp_path, facts={"recipe": "tiny/base"})
    assert "tiny/base" in page.read_text()
    assert "### Changes" in (tmp_path / "report.md").read_text()
    assert set(json.loads((tmp_path / "comparison.json").read_text())["summaries"]) == {"after SFT", "after RL"}
