"""Evaluation on the rollout path: durable, resumable, and independent of interruptions."""

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from error_cases import raises
from evaluation_cases import task

from saccade.config.schema import EvaluationConfig, RewardTerm
from saccade.data.synthetic.video_writer import write_video
from saccade.engines.scripted import Scripted
from saccade.environments.single_turn import SingleTurn
from saccade.environments.tool_calling import ToolCalling
from saccade.errors import ConfigError, EngineError, RunError
from saccade.evaluation.records import read_records, read_scored_episodes, read_ungraded_episodes
from saccade.evaluation.runner import evaluate
from saccade.evaluation.subset import assign_frame_budgets
from saccade.media.cache import CachingMediaLoader
from saccade.metrics.episode_metrics import has_failed
from saccade.protocols import Context
from saccade.rewards.compose import compose_rewards, score_each
from saccade.testing import FakeMediaLoader
from saccade.types import AnswerType, EpisodeStatus, Media, SamplingParams, Task, Ungraded

TASKS = [task(f"w-{i}", question=("at", "when")[i % 2]) for i in range(8)]
CALL = 'Look.</think><tool_call>{"name":"crop_video","arguments":{"start_time":0,"end_time":8}}</tool_call>'
SCORE = compose_rewards({"accuracy": RewardTerm(is_accuracy=True)})


class Killed(BaseException):
    """Simulates a kill. asyncio raises KeyboardInterrupt at once, and its tasks would end during a later test."""


class CountingEngine(Scripted):
    """Answer "red" or "blue" by the seed; count requests; raise Killed after `lives` requests."""

    asked = 0
    temperatures = frozenset()
    lives = 10**6

    async def generate(self, request):
        self.asked += 1
        self.temperatures |= {request.sampling.temperature}
        if self.asked > self.lives:
            raise Killed
        self._replies = lambda ledger: f"I see.</think><answer>{('red', 'blue')[request.sampling.seed % 2]}</answer>"
        return await super().generate(request)


def run(renderer, path, *, engine=None, tasks=TASKS, environment=ToolCalling, media=None, **settings):
    engine = engine or CountingEngine(renderer)
    passed = ("identity", "on_progress", "max_concurrency", "score_fn", "subset", "root")
    given = {key: settings.pop(key) for key in passed if key in settings}
    sampling, seed = SamplingParams(max_tokens=settings.pop("max_tokens", 200)), settings.pop("seed", 7)
    base = Context(engine=engine, renderer=renderer, media=media or FakeMediaLoader(), sampling=sampling, seed=seed)
    settings = EvaluationConfig(**{"frame_budgets": (4, 8), "temperature": 0.6, **settings})
    return asyncio.run(
        evaluate(
            tasks,
            environments=lambda task: environment,
            context=base,
            settings=settings,
            results_path=path,
            **{"score_fn": SCORE, **given},
        )
    )


def bare(results):
    return [
        (outcome.episode.task.id, outcome.episode.frame_budget, outcome.episode.answer, outcome.score)
        for outcome in results
    ]


def test_results_are_ordered_and_written(renderer, tmp_path):
    progress = []
    engine = CountingEngine(renderer)
    results = run(renderer, tmp_path / "e" / "all.jsonl", engine=engine, num_samples=2, on_progress=progress.append)
    assert [scored.episode.task.id for scored in results] == [task.id for task in TASKS for _ in range(2)]
    assert [(update.done, update.total) for update in progress] == [(2 * i, 16) for i in range(9)]
    assert progress[0].accuracy_text == ""
    assert progress[-1].accuracy == sum(scored.score.parts["accuracy"] for scored in results) / 16
    assert progress[-1].accuracy_text == f"accuracy {progress[-1].accuracy:.3f}"
    assert engine.temperatures == {0.6}
    records = read_records(tmp_path / "e" / "all.jsonl")
    assert len({record.key for record in records}) == 16
    assert {result.score.value for result in results} == {0.0, 1.0}
    assert sorted(bare(read_scored_episodes(tmp_path / "e" / "all.jsonl")), key=str) == sorted(bare(results), key=str)


def test_rerun_returns_stored_results(renderer, tmp_path):
    first = run(renderer, tmp_path / "a.jsonl")
    engine = CountingEngine(renderer)
    assert run(renderer, tmp_path / "a.jsonl", engine=engine) == first
    assert engine.asked == 0


@pytest.mark.slow
@pytest.mark.parametrize("lives", [1, 5, 9])
def test_killed_evaluation_resumes(renderer, tmp_path, lives):
    complete = run(renderer, tmp_path / "whole.jsonl", num_samples=2)
    dying, path = CountingEngine(renderer), tmp_path / "killed.jsonl"
    dying.lives = lives
    with pytest.raises(Killed):
        run(renderer, path, engine=dying, num_samples=2, max_concurrency=2)
    if path.exists():  # killed in the middle of a line
        path.write_bytes(path.read_bytes() + b'{"task":"x","fra')
    engine = CountingEngine(renderer)
    num_done = len(read_records(path)) if path.exists() else 0
    assert bare(run(renderer, path, engine=engine, num_samples=2)) == bare(complete)
    assert engine.asked == 16 - num_done


def test_more_samples_keep_existing_ones(renderer, tmp_path):
    single = run(renderer, tmp_path / "a.jsonl")
    double = run(renderer, tmp_path / "a.jsonl", num_samples=2)
    assert double[::2] == single
    assert len(read_records(tmp_path / "a.jsonl")) == 16


def test_smaller_limit_is_a_part_of_the_full_results(renderer, tmp_path):
    limited = run(renderer, tmp_path / "a.jsonl", num_tasks=3)
    complete = run(renderer, tmp_path / "a.jsonl")
    assert len(read_records(tmp_path / "a.jsonl")) == 8
    assert all(outcome in complete for outcome in limited)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"temperature": 0.0}, ("settings",)),
        ({"frame_budgets": (4,)}, ("settings",)),
        ({"use_tools": False}, ("tools",)),
        ({"max_tokens": 100}, ("settings",)),
        ({"seed": 8}, ("seed",)),
        ({"identity": {"weights": "other", "environment": "this"}}, ("weights",)),
        ({"identity": {"weights": "other", "environment": "that"}}, ("weights", "environment")),
    ],
)
def test_results_of_other_settings_raise(renderer, tmp_path, change, what):
    path, this = tmp_path / "a.jsonl", {"weights": "these", "environment": "this"}
    run(renderer, path, identity=this)
    before = path.read_bytes()
    with raises(RunError, key=str(path), value=what):
        run(renderer, path, **{"identity": this, **change})
    assert path.read_bytes() == before


def write_clip(path, shade):
    write_video(path, np.full((16, 32, 32, 3), shade, np.uint8), 4.0)
    return str(path)


def test_replaced_video_is_evaluated_again(renderer, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    (
        write_clip(tmp_path / "a" / "clip.mp4", 90),
        write_clip(tmp_path / "b" / "clip.mp4", 90),
        write_clip(tmp_path / "c.mp4", 200),
    )

    def count_requests(folder):
        tasks = [replace(task, media=(Media(path=str(tmp_path / folder / "clip.mp4")),)) for task in TASKS[:3]]
        engine = CountingEngine(renderer)
        results = run(renderer, tmp_path / "e.jsonl", engine=engine, tasks=tasks, media=CachingMediaLoader())
        assert (
            len(read_scored_episodes(tmp_path / "e.jsonl")) == len(results) == 3
        )  # results for the old video don't count
        return engine.asked

    assert count_requests("a") == 3
    assert count_requests("b") == 0  # the same video in another folder
    (tmp_path / "c.mp4").rename(tmp_path / "b" / "clip.mp4")
    assert count_requests("b") == 3
    assert count_requests("b") == 0


class Stopped(Exception):
    pass


def stop(progress):
    raise Stopped


def test_results_of_a_changed_task_are_void(renderer, tmp_path, caplog):
    """They stay in the file and count nowhere, even if the rerun is stopped; they count again with the old task."""
    path = tmp_path / "e.jsonl"
    first = run(renderer, path, num_samples=2)
    lines = path.read_text().splitlines()
    changed = [replace(TASKS[0], ground_truth="blue"), *TASKS[1:]]
    with caplog.at_level(logging.WARNING), pytest.raises(Stopped):
        run(renderer, path, tasks=changed, num_samples=2, on_progress=stop)
    (warning,) = caplog.records
    assert warning.args[1:] == (2, 1, TASKS[0].id)
    assert {scored.episode.task.id for scored in read_scored_episodes(path)} == {task.id for task in TASKS[1:]}
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record.pop("is_void", False) for record in stored].count(True) == 2
    assert stored == [json.loads(line) for line in lines]

    engine = CountingEngine(renderer)
    results = run(renderer, path, tasks=changed, num_samples=2, engine=engine)
    assert engine.asked == 2
    assert {scored.episode.task.ground_truth for scored in results[:2]} == {"blue"}
    assert results[2:] == first[2:]
    assert sorted(bare(read_scored_episodes(path)), key=str) == sorted(bare(results), key=str)

    engine = CountingEngine(renderer)
    assert run(renderer, path, num_samples=2, engine=engine) == first
    assert engine.asked == 0
    assert sorted(bare(read_scored_episodes(path)), key=str) == sorted(bare(first), key=str)


def test_void_results_of_other_weights_stay_void(renderer, tmp_path):
    path, changed = tmp_path / "e.jsonl", [replace(TASKS[0], ground_truth="blue")]
    run(renderer, path, tasks=TASKS[:1], identity={"weights": "old"})
    with pytest.raises(Stopped):
        run(renderer, path, tasks=changed, identity={"weights": "old"}, on_progress=stop)
    engine = CountingEngine(renderer)
    results = run(renderer, path, tasks=TASKS[:1], identity={"weights": "new"}, engine=engine)
    assert engine.asked == 1
    assert read_scored_episodes(path) == results
    assert run(renderer, path, tasks=TASKS[:1], identity={"weights": "new"}) == results


def test_missing_video_is_retried(renderer, tmp_path):
    tasks = [replace(TASKS[0], media=(Media(path=str(tmp_path / "clip.mp4")),))]
    (missing,) = run(renderer, tmp_path / "e.jsonl", tasks=tasks, media=CachingMediaLoader())
    assert missing.episode.status is EpisodeStatus.ABORTED
    write_clip(tmp_path / "clip.mp4", 90)
    results = run(renderer, tmp_path / "e.jsonl", tasks=tasks, media=CachingMediaLoader())
    assert [result.episode.status for result in results] == [EpisodeStatus.ANSWERED]
    assert read_scored_episodes(tmp_path / "e.jsonl") == results


def test_prompt_shows_the_assigned_frame_budget(renderer, tmp_path):
    budgets = assign_frame_budgets(TASKS, (4, 8))
    for scored in run(renderer, tmp_path / "a.jsonl"):
        assert scored.episode.frame_budget == budgets[scored.episode.task.id]
        assert len(scored.episode.ledger.segments[0].slots) == scored.episode.frame_budget


def test_no_call_is_executed_with_tools_off(renderer, tmp_path):
    replies = [CALL, "Now.</think><answer>red</answer>"] * 8
    engine = Scripted(renderer, replies=lambda ledger: replies[len(ledger.segments) // 3 % 2])
    found = run(renderer, tmp_path / "a.jsonl", engine=engine, use_tools=False)
    assert all(scored.episode.status is EpisodeStatus.ANSWERED for scored in found)
    assert not any(result.was_executed for scored in found for result in scored.episode.results)


def test_tools_off_needs_a_tool_environment(renderer, tmp_path):
    with raises(ConfigError, key="evaluation.use_tools", value=False):
        run(renderer, tmp_path / "a.jsonl", environment=partial(SingleTurn), use_tools=False)


def test_missing_video_scores_zero(renderer, tmp_path):
    gone = Task(
        id="gone", question="?", media=(Media(path="missing.mp4"),), answer_type=AnswerType.OPEN, ground_truth="red"
    )
    found = run(renderer, tmp_path / "a.jsonl", tasks=[*TASKS[:2], gone])
    assert [scored.episode.status for scored in found][-1] is EpisodeStatus.ABORTED
    assert "missing.mp4" in found[-1].episode.error
    assert found[-1].score.parts["accuracy"] == 0.0


class ShakyEngine(CountingEngine):
    """Like `CountingEngine`, but fail at the requests in `failing`."""

    failing = frozenset()

    async def generate(self, request):
        if self.asked in self.failing:
            self.asked += 1
            raise EngineError("the server disconnected")
        return await super().generate(request)


def test_only_failed_episodes_are_retried(renderer, tmp_path):
    complete, path = run(renderer, tmp_path / "whole.jsonl"), tmp_path / "a.jsonl"
    first = ShakyEngine(renderer)
    first.failing = {1, 4, 6}
    failed = run(renderer, path, engine=first)
    assert sum(scored.episode.status is EpisodeStatus.ABORTED for scored in failed) == 3
    assert (
        sum(has_failed(scored.episode) for scored in read_scored_episodes(path)) == 3
    )  # a report counts the remaining failures
    second = ShakyEngine(renderer)
    second.failing = {2}
    run(renderer, path, engine=second)
    assert second.asked == 3
    assert sum(has_failed(scored.episode) for scored in read_scored_episodes(path)) == 1
    third = CountingEngine(renderer)
    assert bare(run(renderer, path, engine=third)) == bare(complete)
    assert third.asked == 1
    assert len(path.read_bytes().splitlines()) == 8 + 3 + 1
    assert sorted(bare(read_scored_episodes(path)), key=str) == sorted(
        bare(complete), key=str
    )  # a superseded line is ignored


def test_failed_engine_of_a_sub_agent_is_retried(renderer, tmp_path):
    """The sub-agent's engine fails, which is a tool error and not the model's fault."""

    class FailingEngine(Scripted):
        async def generate(self, request):
            if len(request.ledger.segments) == 1:
                raise EngineError("the server disconnected")
            return await super().generate(request)

    path = tmp_path / "a.jsonl"
    (failed,) = run(renderer, path, engine=FailingEngine(renderer, replies=lambda ledger: CALL), tasks=TASKS[:1])
    assert failed.episode.status is EpisodeStatus.ENVIRONMENT_ERROR
    (retried,) = run(renderer, path, tasks=TASKS[:1])
    assert retried.episode.status is EpisodeStatus.ANSWERED


def test_one_failed_sample_of_several_is_rewritten_alone(renderer, tmp_path):
    path, engine = tmp_path / "a.jsonl", ShakyEngine(renderer)
    engine.failing = {1}
    before = run(renderer, path, engine=engine, tasks=TASKS[:1], num_samples=3)
    after = run(renderer, path, tasks=TASKS[:1], num_samples=3)
    assert [scored.episode.status for scored in before].count(EpisodeStatus.ABORTED) == 1
    assert len(path.read_bytes().splitlines()) == 4
    assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1


def test_ungraded_episodes_are_excluded_counted_and_retried(renderer, tmp_path):
    path, judged = tmp_path / "a.jsonl", []

    async def judge(episode):
        judged.append(episode.task.id)
        return Ungraded(reason="the judge timed out") if len(judged) in (2, 5) else (await SCORE([episode]))[0]

    before = run(renderer, path, tasks=TASKS[:2], num_samples=3, score_fn=score_each(judge))
    assert len(before) == len(read_scored_episodes(path)) == 4
    ungraded = read_ungraded_episodes(path)
    assert [outcome.reason for outcome in ungraded] == ["the judge timed out"] * 2
    after = run(renderer, path, tasks=TASKS[:2], num_samples=3)
    assert bare(after) == bare(run(renderer, tmp_path / "whole.jsonl", tasks=TASKS[:2], num_samples=3))
    assert read_ungraded_episodes(path) == []
    assert all(outcome in after for outcome in before)


CHOICES = [
    Task(
        id=f"c-{i}",
        question="Which?",
        media=(Media(path="clip.mp4"),),
        answer_type=AnswerType.CHOICE,
        ground_truth="A",
        options=words,
    )
    for i, words in enumerate([("red", "blue", "green"), ("red", "blue", "both A and B")])
]


@pytest.mark.parametrize("answer", ["red", "A"])
def test_shuffled_options_are_graded_by_their_own_order(renderer, tmp_path, answer):
    tasks, path = [*CHOICES, TASKS[0]], tmp_path / "a.jsonl"
    engine = Scripted(renderer, replies=lambda ledger: f"So.</think><answer>{answer}</answer>")
    found = run(renderer, path, engine=engine, tasks=tasks, num_samples=6, shuffle_options=True)
    assert [scored.episode.task.id for scored in found] == [task.id for task in tasks for _ in range(6)]
    asked = [scored.episode.task for scored in found]
    assert len({task.options for task in asked[:6]}) > 1
    assert {task.options for task in asked[6:12]} == {CHOICES[1].options}
    right = [
        (task.ground_truth if answer == "A" else task.options[ord(task.ground_truth) - 65]) == answer
        for task in asked[:12]
    ]
    assert [scored.score.parts["accuracy"] == 1 for scored in found[:12]] == right
    assert [record.sample_index for record in read_records(path)] == [*range(6)] * 3
    again = CountingEngine(renderer)
    assert run(renderer, path, engine=again, tasks=tasks, num_samples=6, shuffle_options=True) == found
    assert again.asked == 0
    with raises(RunError, key=str(path), value=("settings",)):
        run(renderer, path, tasks=tasks, num_samples=6)


def test_samples_with_shuffled_options_have_different_seeds(renderer, tmp_path):
    found = run(renderer, tmp_path / "a.jsonl", tasks=[TASKS[0]], num_samples=12, shuffle_options=True)
    assert len({each.episode.answer for each in found}) == 2  # red and blue, by the seed
