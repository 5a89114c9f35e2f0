"""`saccade report` writes a page of any run: of SFT, RL or an evaluation, finished or not."""

import json
import re
import shutil

import pytest
from commands import RL, SFT, fail, good

from saccade.config.load import load_recipe
from saccade.errors import RunError
from saccade.ledger import Ledger
from saccade.reporting.run_report import EMPTY_RUN_WARNING, build_call_tables, build_rollout_tables, find_alarms
from saccade.runs.run_folder import Run
from saccade.training.episode_log import RolloutRecord
from saccade.types import Episode, EpisodeStatus, Task

SHORT = [*SFT, *RL, "sampling.max_tokens=8", "evaluation.num_tasks=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder, dataset_folder):
    """A finished SFT and RL, without an evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    start = ["tiny/para_grpo", *SHORT, "--model", tiny_folder, "--data", dataset_folder, "--out", folder]
    good("sft", *start)
    good("rl", *start, "--resume")
    return folder


def read_page(path):
    page = path.read_text()
    assert not re.search(r"<script|<link|(src|href)=.(?!data:|#)", page)
    return page


@pytest.mark.slow
def test_a_training_without_an_evaluation(trained, tmp_path):
    before = sorted(path.name for path in trained.iterdir())
    out = tmp_path / "page.html"
    good("report", trained, "--out", out)
    assert sorted(path.name for path in trained.iterdir()) == before  # with --out the run isn't written
    page = read_page(out)
    assert "4 of 4" in page
    assert "Episodes of rl, step 4" in page
    assert "episode-1" in page  # an example of the rollouts
    good("report", trained)
    assert read_page(trained / "report.html").count("<article") == page.count("<article")


@pytest.mark.slow
def test_an_interrupted_training(trained, tmp_path):
    """It was killed while it wrote a line of metrics and an episode file, and its model was moved."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for name in ("rl", "sft", "finished_stages"):
        shutil.rmtree(folder / name)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:40])
    newest = sorted((folder / "episodes").glob("*.jsonl.gz"))[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    good("report", folder)
    page = read_page(folder / "report.html")
    assert "2 of 4" in page
    assert "unfinished" in page


@pytest.mark.slow
def test_an_evaluation_alone(tmp_path, tiny_folder, dataset_folder):
    folder = tmp_path / "run"
    tasks = dataset_folder / "test/tasks.jsonl"
    good("eval", "tiny/para_grpo", *SHORT, "--model", tiny_folder, "--tasks", tasks, "--out", folder)
    good("report", folder)
    assert "Results" in read_page(folder / "report.html")


def test_tool_calls_per_tool_and_per_source():
    fixed = {"tool/crop_video/frac_failed": 0.25, "tool/crop_video/reward_diff": 0.5, "source/a/b/calls": 1.0}
    rows = [
        {"step": step, "tool/crop_video/calls": calls, **fixed} for step, calls in ((18, 9.0), (19, 1.0), (20, 2.0))
    ]
    rows = [{"step": step} for step in range(17)] + rows  # of 20 steps the last two count
    (section,) = build_call_tables(rows)
    by_tool, by_source = section.tables
    assert by_tool.rows == (("crop_video", "1.50", "–", "25%", "–", "–", "+0.50"),)
    assert by_source.rows == (("a/b", "1.00", "–", "–", "–", "–", "–"),)
    assert "19 to 20" in section.notes[0]
    assert build_call_tables([{"step": 1, "calls": 2.0}]) == build_call_tables([]) == []


def test_a_run_that_has_not_begun(tmp_path):
    Run.create(tmp_path / "run", load_recipe("tiny/base"))
    good("report", tmp_path / "run")
    page = read_page(tmp_path / "run/report.html")
    assert "The resolved recipe" in page
    assert EMPTY_RUN_WARNING in page


def test_a_folder_without_a_run(tmp_path):
    fail(RunError, "report", tmp_path, key=tmp_path)


@pytest.mark.slow
def test_alarms_and_validations_are_shown(tmp_path):
    rules = ["alarms={low: {metric: validation/greedy/accuracy, below: 0.5, window: 1}}"]
    run = Run.create(tmp_path / "run", load_recipe("tiny/base", [*rules, "validation.every=1"]))
    for step, accuracy in enumerate((0.75, 0.25), 1):
        run.log("rl", step, {"step": step, "reward": accuracy, "alarm/low": 0.0})
        interval = {"greedy/accuracy/low": accuracy - 0.125, "greedy/accuracy/high": accuracy + 0.125}
        values = {"greedy/accuracy": accuracy, **interval, "greedy/episodes": 8, "greedy/tasks": 8}
        run.log("rl_validation", step, {"step": step, **values, "alarm/low": float(accuracy < 0.5)})
    good("report", run.path)
    page = read_page(run.path / "report.html")
    assert "0.25" in page
    assert "[0.12, 0.38]" in page
    assert "validation/greedy/accuracy over 1 values is 0.25, below 0.5" in page
    rows = {stage: run.read_metrics(stage) for stage in ("rl", "rl_validation")}
    assert [found[:2] for found in find_alarms(run.recipe.alarms, *rows.values())] == [(2, "low")]
    assert json.loads((run.path / "comparison.json").read_text())["summaries"] == {}


@pytest.mark.slow
def test_an_alarm_of_a_validation_beside_the_training_is_shown_as_the_stop(tmp_path):
    """The validation of step 1 ends during step 3, at which the training stops."""
    rule = "alarms={low: {metric: validation/greedy/accuracy, below: 0.5, window: 1, action: stop}}"
    run = Run.create(tmp_path / "run", load_recipe("tiny/base", [rule, "validation.every=1"]))
    run.log("rl_validation", 0, {"step": 0, "greedy/accuracy": 0.75, "greedy/episodes": 8, "alarm/low": 0.0})

    def read_progress():
        good("report", run.path)
        return next(line for line in (run.path / "report.md").read_text().splitlines() if line.startswith("| rl "))

    assert "0 of" in read_progress()  # no step is finished
    for step in (1, 2):
        run.log("rl", step, {"step": step, "reward": 0.5, "alarm/low": 0.0})
    assert "unfinished" in read_progress()
    run.log("rl_validation", 1, {"step": 1, "greedy/accuracy": 0.25, "greedy/episodes": 8, "alarm/low": 1.0})
    run.log("rl", 3, {"step": 3, "reward": 0.5, "alarm/low": 1.0})
    assert "stopped by the alarm low" in read_progress()
    run.log("rl", 4, {"step": 4, "reward": 0.5, "alarm/low": 1.0})  # it was resumed
    assert "unfinished" in read_progress()


def test_rare_reasons_are_summed_up():
    task = Task(id="a", question="?", media=(), answer_type="open", ground_truth="x")
    records = []
    for number in range(60):
        error = f"error {max(number - 30, 0)}"  # the first one 31 times, 29 others once
        episode = Episode(
            task=task, environment="single_turn", ledger=Ledger(), turns=(), status=EpisodeStatus.ABORTED, error=error
        )
        records.append(RolloutRecord(stage="rl", step=1, group=number, index=0, outcome="kept", episode=episode))
    ((table,),) = (section.tables for section in build_rollout_tables(records))
    assert table.rows[0] == ("kept", "31", "error 0")
    assert len(table.rows) == 21
    assert table.rows[-1][:2] == ("other reasons", "10")
    assert build_rollout_tables([]) == []
