"""Validation during a training: fixed held-out tasks, refused overlaps, lines of its own, no effect on the training."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import RL, SFT, good, run
from error_cases import raises

import saccade
from saccade.checks.run_checks import check_recipe
from saccade.config.load import load_recipe
from saccade.config.schema import CheckpointConfig
from saccade.data.dataset import load_tasks
from saccade.errors import AlarmError, ConfigError, DataError
from saccade.metrics.episode_metrics import group_by_task
from saccade.models.checkpoint_files import compute_checkpoint_digest
from saccade.rollouts.components import apply_evaluation_settings, apply_sft_settings, apply_validation_settings
from saccade.runs import pipeline
from saccade.runs.run_folder import Run
from saccade.runs.validation import (
    compute_validation_metrics,
    find_shared_files,
    load_validation_tasks,
    require_checkpoint_metric,
    select_tasks,
)
from saccade.types import Demonstration, Episode, EpisodeStatus, Group, Score, ScoredEpisode, Task, UngradedEpisode
from saccade.utils.jsonl import write_jsonl

ON = ["validation={every: 2, num_tasks: 2, num_samples: 2, modes: [greedy, sampled]}"]
# A reward that differs within every group, and that depends on the episode alone.
REWARD = """
def variety(episode):
    return sum(episode.ledger.sampled_tokens()) % 97 / 97
"""
TIMES = ("rollout/reward_seconds", "seconds", "sampled_tokens_per_second", "packed_tokens_per_second", "memory_")


def build_recipe(dataset_folder, *settings, model=None):
    return pipeline.with_paths(
        load_recipe("tiny/para_grpo", [*SFT, *RL, "sampling.max_tokens=8", *settings]),
        data=dataset_folder,
        model=model and Path(model),
    )


# ---- which tasks -----------------------------------------------------------------------------------------------------


def test_tasks_are_the_same_in_any_order(dataset_folder):
    tasks = load_tasks(dataset_folder / "train/tasks.jsonl")
    selected = select_tasks(tasks, 3, seed=1)
    assert selected == select_tasks(tasks[::-1], 3, seed=1)
    assert len(selected) == 3
    assert [*map(id, select_tasks(tasks, 0, seed=1))] != [*map(id, select_tasks(tasks, 0, seed=2))]
    assert len(select_tasks(tasks, 0, seed=1)) == len(tasks)


def test_the_validation_split_is_disjoint(dataset_folder):
    recipe, tasks = build_recipe(dataset_folder, *ON), load_tasks(dataset_folder / "train/tasks.jsonl")
    held_out = load_validation_tasks(dataset_folder, recipe, tasks)
    assert {task.id for task in held_out} <= {task.id for task in load_tasks(dataset_folder / "validation/tasks.jsonl")}
    assert load_validation_tasks(dataset_folder, build_recipe(dataset_folder), tasks) == []


@pytest.mark.parametrize("content", [None, ""])
def test_missing_tasks_are_refused(tmp_path, dataset_folder, content):
    path = tmp_path / "validation.jsonl"
    if content is not None:
        path.write_text(content)
    given = "" if content is None else str(path)
    recipe = build_recipe(dataset_folder, *ON).with_values({"data.validation": given})
    with raises(DataError, key="data.validation" if content is None else None):
        load_validation_tasks(tmp_path, recipe, load_tasks(dataset_folder / "train/tasks.jsonl"))


def test_overlapping_tasks_are_refused_with_counts(dataset_folder):
    file = str(dataset_folder / "train/tasks.jsonl")
    tasks = load_tasks(file)
    recipe = build_recipe(dataset_folder, *ON).with_values({"data.validation": file})
    with raises(DataError, key="data.validation", value=file) as caught:
        load_validation_tasks(dataset_folder, recipe, tasks[:1])
    assert f"1 of its {len(tasks)} tasks and 1 of its 4 media files" in str(caught.value)


def test_a_copied_clip_is_refused(tmp_path, dataset_folder):
    """Another question about a copy of a training clip, under another name."""
    tasks = load_tasks(dataset_folder / "train/tasks.jsonl")
    copy = tmp_path / "copy.mp4"
    shutil.copy(tasks[0].media[0].path, copy)
    other = replace(tasks[0], id="other", media=(replace(tasks[0].media[0], path=str(copy)),))
    write_jsonl(tmp_path / "validation.jsonl", [other])
    recipe = build_recipe(dataset_folder, *ON).with_values({"data.validation": str(tmp_path / "validation.jsonl")})
    with raises(DataError, key="data.validation") as caught:
        load_validation_tasks(tmp_path, recipe, tasks)
    assert "0 of its 1 tasks and 1 of its 1 media files" in str(caught.value)
    copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    assert load_validation_tasks(tmp_path, recipe, tasks)


def test_a_renamed_task_without_media_is_refused(tmp_path, dataset_folder):
    task = Task(id="a", question="What is 2 + 2?", media=(), answer_type="number", ground_truth=4.0)
    others = [replace(task, id="b", extras={"split": "test"}), replace(task, id="c", question="What is 2 + 3?")]
    write_jsonl(tmp_path / "validation.jsonl", others)
    recipe = build_recipe(dataset_folder, *ON).with_values({"data.validation": str(tmp_path / "validation.jsonl")})
    with raises(DataError, key="data.validation") as caught:
        load_validation_tasks(tmp_path, recipe, [task])
    assert "1 of its 2 tasks and 0 of its 0 media files" in str(caught.value)
    assert len(load_validation_tasks(tmp_path, recipe, [replace(task, ground_truth=5.0)])) == 2


def test_tasks_of_the_sft_that_rl_starts_from_are_refused(tmp_path, dataset_folder):
    """The SFT is another run's, and one of its demonstrations is about a validation task."""
    held_out, *_ = load_tasks(dataset_folder / "validation/tasks.jsonl")
    demonstration = Demonstration(task=held_out, frame_budget=None, replies=("<answer>red</answer>",))
    write_jsonl(tmp_path / "demonstrations.jsonl", [demonstration])
    recipe, source = build_recipe(dataset_folder, *ON), tmp_path / "source"
    Run.create(source, recipe.with_values({"data.demonstrations": str(tmp_path / "demonstrations.jsonl")}))
    (source / "sft/step-000001").mkdir(parents=True)
    recipe = recipe.with_values({"model.path": str(source / "sft/step-000001")})
    with raises(DataError, key="data.validation") as caught:
        pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, values: None)
    assert "1 of its" in str(caught.value)


def test_unreadable_files_are_left_out(tmp_path, dataset_folder):
    (task, *_) = load_tasks(dataset_folder / "train/tasks.jsonl")
    missing = replace(task, media=(replace(task.media[0], path=str(tmp_path / "none.mp4")),))
    assert find_shared_files([missing], [missing]) == []


# ---- metrics ---------------------------------------------------------------------------------------------------------


def build_group(name, *values):
    task = Task(id=name, question="?", media=(), answer_type="open", ground_truth="x")
    episode = Episode(
        task=task, environment="single_turn", ledger=saccade.Ledger(), turns=(), status=EpisodeStatus.LENGTH
    )
    scored = [
        ScoredEpisode(episode=episode, score=Score(value=value, correct=value)) for value in values if value is not None
    ]
    ungraded = [
        UngradedEpisode(episode=episode, group_index=index, reason="the judge timed out")
        for index, value in enumerate(values)
        if value is None
    ]
    return Group(task=task, scored_episodes=tuple(scored), ungraded=tuple(ungraded))


def test_metrics_of_a_mode():
    groups = [build_group("a", 1.0, 0.0), build_group("b", 1.0, 1.0), build_group("c", 0.0, None)]
    metrics = compute_validation_metrics(groups)
    assert metrics["accuracy"] == metrics["reward"] == 3 / 5
    assert metrics["accuracy/low"] <= 3 / 5 <= metrics["accuracy/high"]
    assert (metrics["episodes"], metrics["tasks"], metrics["frac_ungraded"]) == (5, 3, 1 / 6)
    assert len(group_by_task(groups[0].scored_episodes)) == 1
    assert compute_validation_metrics([build_group("a", None)]) == {"episodes": 0, "frac_ungraded": 1.0}


@pytest.mark.parametrize(
    ("section", "apply"),
    [
        ("sft", apply_sft_settings),
        ("validation", apply_validation_settings),
        ("evaluation", apply_evaluation_settings),
    ],
)
def test_settings_of_the_environments_apply_to_named_ones_that_have_them(section, apply):
    settings = [f"{section}.environment_settings={{max_tool_turns: 29, num_frames: 3}}"]
    named = "environments={game: {name: python, settings: {max_tool_turns: 2}}, plain: {name: single_turn}}"
    recipe = load_recipe("tiny/para_grpo", [*settings, named])
    changed = apply(recipe)
    assert (changed.environment.settings["max_tool_turns"], recipe.environment.settings["max_tool_turns"]) == (29, 2)
    assert changed.environments["game"].settings == {"max_tool_turns": 29, "num_frames": 3}
    assert changed.environments["plain"].settings == {"num_frames": 3}  # it has no max_tool_turns
    check_recipe(recipe)
    with raises(ConfigError, key="environment.settings.max_tool_turn"):
        check_recipe(load_recipe("tiny/para_grpo", [f"{section}.environment_settings={{max_tool_turn: 29}}"]))


def test_the_metric_of_the_best_checkpoints_exists():
    metrics = {"step": 0, "greedy/episodes": 2, "greedy/accuracy": 0.5}
    require_checkpoint_metric(CheckpointConfig(best=1), "rl", metrics)
    require_checkpoint_metric(CheckpointConfig(metric="greedy/acuracy"), "rl", metrics)  # it isn't compared
    with raises(ConfigError, key="rl.checkpoints.metric", value="greedy/acuracy"):
        require_checkpoint_metric(CheckpointConfig(best=1, metric="greedy/acuracy"), "rl", metrics)
    del metrics["greedy/accuracy"]  # no reward could grade an episode
    require_checkpoint_metric(CheckpointConfig(best=1), "rl", metrics)


# ---- in a training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder, dataset_folder):
    """The same training without and with validation; the second keeps its best checkpoint."""
    root = tmp_path_factory.mktemp("runs")
    (root / "variety.py").write_text(REWARD)
    reward = f"rewards={{accuracy: null, {root / 'variety.py'}: {{is_accuracy: true}}}}"
    best = [f"{stage}.checkpoints={{last: 1, best: 1}}" for stage in ("sft", "rl")]
    more_frames = "validation.environment_settings={num_frames: 3}"
    for name, settings in (("without", [reward]), ("with", [reward, *ON, more_frames, *best])):
        recipe = build_recipe(dataset_folder, *settings, model=tiny_folder)
        for run_stage in (pipeline.run_sft, pipeline.run_rl):
            run_stage(root / name, recipe, resume=run_stage is pipeline.run_rl, on_step=lambda step, values: None)
    return root


def read(folder, stage):
    rows = Run.open(folder).read_metrics(stage)
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_validation_changes_no_number_of_the_training(runs, stage):
    assert read(runs / "without", stage) == read(runs / "with", stage)
    assert all(row["updates"] for row in read(runs / "with", "rl"))
    digests = {compute_checkpoint_digest(runs / name / stage / "step-000004") for name in ("without", "with")}
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_validations_have_lines_of_their_own(runs, stage):
    rows = read(runs / "with", f"{stage}_validation")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert not read(runs / "without", f"{stage}_validation")
    for row in rows:
        assert (row["greedy/episodes"], row["sampled/episodes"]) == (2, 4)
        for mode in ("greedy", "sampled"):
            assert row[f"{mode}/accuracy/low"] <= row[f"{mode}/accuracy"] <= row[f"{mode}/accuracy/high"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_its_validations_and_best_checkpoint(runs, tmp_path):
    """It is stopped in step 3, after the validation and the checkpoint of step 2."""
    folder, steps = tmp_path / "run", []
    shutil.copytree(runs / "with", folder)
    shutil.rmtree(folder / "rl")
    kept = [line for line in (folder / "metrics.jsonl").read_text().splitlines(True) if '"stage":"sft' in line]
    (folder / "metrics.jsonl").write_text("".join(kept))
    recipe = Run.open(folder).recipe

    def stop(step, values):
        steps.append(step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run_rl(folder, recipe, resume=True, on_step=stop)
    assert [row["step"] for row in read(folder, "rl_validation")] == [0, 2]
    pipeline.run_rl(folder, recipe, resume=True, on_step=stop)
    assert steps == [1, 2, 3, 3, 4]
    for stage in ("rl", "rl_validation"):
        assert read(folder, stage) == read(runs / "with", stage)
    names = [sorted(path.name for path in (root / "rl").iterdir()) for root in (folder, runs / "with")]
    assert names[0] == names[1]
    assert (folder / "rl/best").readlink() == (runs / "with/rl/best").readlink()
    for step in (1, 2, 3, 4):
        first, second = (saccade.read_episodes(root, step=step) for root in (folder, runs / "with"))
        assert [record.score for record in first] == [record.score for record in second]


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(runs):
    rows = read(runs / "with", "rl_validation")
    scores = {row["step"]: row["greedy/accuracy"] for row in rows if row["step"]}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert (runs / "with/rl/best").resolve().name == f"step-{best:06d}"


@pytest.mark.slow
def test_every_episode_is_on_disk(runs):
    for row in Run.open(runs / "with").read_metrics("rl"):
        records = saccade.read_episodes(runs / "with", step=row["step"])
        assert len(records) == len({(record.group, record.index) for record in records})
        rewards = [record.score.total for record in records if record.score]
        assert sum(rewards) / len(rewards) == pytest.approx(row["reward"])
        kept = {record.group for record in records if record.outcome == "kept"}
        assert len(kept) == row["groups/kept"]
        dropped = sum(record.outcome == "dropped" for record in records)
        assert dropped == sum(value for name, value in row.items() if name.startswith("episodes/dropped/"))
    validation = saccade.read_episodes(runs / "with", step=2, stage="rl_validation")
    assert [record.mode for record in validation] == ["greedy"] * 2 + ["sampled"] * 4
    assert {record.outcome for record in validation} == {"validation"}
    assert {record.episode.frame_budget for record in validation} == {3}  # the validation's own setting
    assert {record.episode.frame_budget for record in saccade.read_episodes(runs / "with", step=2)}.isdisjoint({3})


@pytest.mark.slow
def test_rl_protects_the_checkpoint_it_starts_from(runs, tmp_path):
    """SFT continues in the folder of an RL run; its checkpoint that RL started from stays."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "without", folder)
    recipe = Run.open(folder).recipe.with_values({"sft.steps": 8, "sft.save_every": 1})
    pipeline.run_sft(folder, recipe, resume=True, on_step=lambda step, values: None)
    assert sorted(path.name for path in (folder / "sft").iterdir()) == ["step-000004", "step-000007", "step-000008"]


@pytest.mark.slow
def test_an_alarm_stops_with_a_checkpoint_and_an_exit_code(tmp_path, tiny_folder, dataset_folder):
    folder, rule = tmp_path / "run", "{metric: loss, above: 0.0, window: 3, action: stop}"
    settings = [*SFT, "sft={steps: 5, save_every: 5}"]
    start = ["sft", "tiny/para_grpo", *settings, "--model", tiny_folder, "--data", dataset_folder, "--out", folder]
    done = run(*start, f"alarms={{high: {rule}}}")
    assert done.exit_code == 3, done.output
    assert done.stderr.count("\n") == 2  # the warning and the error
    assert [path.name for path in (folder / "sft").iterdir()] == ["step-000003"]
    assert not Run.open(folder).is_done("sft")
    rows = Run.open(folder).read_metrics("sft")
    assert [row["alarm/high"] for row in rows] == [0.0, 0.0, 1.0]
    assert "stopped by the alarm high" in Path(good("report", folder).split("wrote ")[1].strip()).read_text()
    good(*start, f"alarms={{high: {rule}}}", "--resume")  # the alarm is still active, and doesn't stop the run again
    assert [row["step"] for row in Run.open(folder).read_metrics("sft")] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_unknown_metric_of_the_best_checkpoints_ends_the_training_at_once(tmp_path, tiny_folder, dataset_folder):
    policy = "sft.checkpoints={best: 1, metric: greedy/acuracy}"
    recipe = build_recipe(dataset_folder, *ON, policy, model=tiny_folder)
    with raises(ConfigError, key="sft.checkpoints.metric", value="greedy/acuracy"):
        pipeline.run_sft(tmp_path / "run", recipe, on_step=lambda step, values: None)
    assert not Run.open(tmp_path / "run").read_metrics("sft")


@pytest.mark.slow
def test_a_stop_in_rl_raises(tmp_path, tiny_folder, dataset_folder):
    rule = "alarms={fast: {metric: validation/greedy/episodes, above: 0, window: 2, action: stop}}"
    recipe = build_recipe(dataset_folder, *ON, rule, model=tiny_folder)
    with raises(AlarmError, key="alarms.fast", value=2.0):
        pipeline.run_rl(tmp_path / "run", recipe, on_step=lambda step, values: None)
    assert [path.name for path in (tmp_path / "run/rl").iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_a_traced_step_is_a_chrome_trace(tmp_path, tiny_folder, dataset_folder):
    folder = tmp_path / "run"
    start = [
        "tiny/para_grpo",
        *SFT,
        "sft={steps: 2, tokens_per_step: 50}",
        "--model",
        tiny_folder,
        "--data",
        dataset_folder,
    ]
    good("sft", *start, "--out", folder, "--profile", 2)
    (path,) = (folder / "profile").iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert path.name == "sft-step-000002.json"
    assert any("backward" in str(event.get("name")).lower() for event in events)
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    assert run("sft", *start, "--out", folder, "--resume", "--profile", 2).exit_code == 1
