"""Episodes as a benchmark's answers: the last turn's text, and errors that are never graded."""

import asyncio
from dataclasses import replace

import pytest
from toy_rows import write_copy

from saccade import plugins
from saccade.evaluation.benchmark_result import build_plain_result
from saccade.evaluation.benchmarks.base import build_score_fn, extract_answer, grade_episodes
from saccade.rewards.compose import build_group
from saccade.types import Block, BlockKind, Episode, EpisodeStatus, Ledger, Reply, Turn


@pytest.fixture
def benchmark():
    return plugins.resolve("evaluation.benchmarks", "videomme", {})()


@pytest.fixture
def task(benchmark, tmp_path):
    return benchmark.load_tasks(write_copy("videomme", tmp_path))[0]


def episode(task, *texts, end=EpisodeStatus.ANSWERED, error=None):
    replies = [Reply(text=text, blocks=(Block(kind=BlockKind.TEXT, body=text, is_closed=True),)) for text in texts]
    turns = tuple(Turn(reply=reply) for reply in replies)
    return Episode(task=task, environment="direct", ledger=Ledger(), turns=turns, status=end, error=error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "end", "value"),
    [
        (("<think>A?</think><answer>C</answer>",), EpisodeStatus.ANSWERED, 1),
        (("<think>A?</think><answer>C",), EpisodeStatus.LENGTH, 1),
        (("<answer>C</answer>", "<answer>B</answer>"), EpisodeStatus.ANSWERED, 0),
        (("<think>Both C and",), EpisodeStatus.LENGTH, 0),
        (("<answer>C</answer>",), EpisodeStatus.ABORTED, 0),
        ((), EpisodeStatus.CONTEXT_FULL, 0),
        (("",), EpisodeStatus.NO_ANSWER, 0),
    ],
)
def test_the_score_of_an_episode(benchmark, task, texts, end, value):
    [score] = asyncio.run(build_score_fn(benchmark, "strict")([episode(task, *texts, end=end)]))
    assert score.value == score.correct == value


@pytest.mark.slow
def test_failed_episode_is_an_error_with_its_reason(benchmark, task):
    broken = episode(task, "<answer>C</answer>", end=EpisodeStatus.ABORTED, error="the video can't be decoded")
    assert extract_answer(broken).error == "the video can't be decoded"
    fine = episode(replace(task, id="another"), "<answer>C</answer>")
    scores = asyncio.run(build_score_fn(benchmark, "strict")([broken, fine]))
    scored = build_group([broken, fine], scores).scored_episodes
    found = build_plain_result(benchmark, grade_episodes(benchmark, scored))
    assert (found.num_tasks, found.errors, found.unparsed, found.score) == (2, 1, 0, 50)
