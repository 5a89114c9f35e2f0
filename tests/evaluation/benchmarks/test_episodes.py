"""Episodes as a benchmark's answers: the last turn's whole text, and errors that are never marked."""

from dataclasses import replace

import pytest
from toy_rows import write_copy

from saccade import plugins
from saccade.evaluation.benchmarks._benchmark import report
from saccade.evaluation.benchmarks._episodes import answer_of, results_of, scorer
from saccade.types import Block, BlockKind, End, Episode, Ledger, Reply, Scored, Turn


@pytest.fixture
def benchmark():
    return plugins.bind("evaluation.benchmarks", "videomme", {})()


@pytest.fixture
def task(benchmark, tmp_path):
    return benchmark.tasks(write_copy("videomme", tmp_path))[0]


def episode(task, *texts, end=End.ANSWERED, error=None):
    replies = [Reply(text=text, blocks=(Block(kind=BlockKind.TEXT, body=text, closed=True),)) for text in texts]
    turns = tuple(Turn(reply=reply) for reply in replies)
    return Episode(task=task, agent="direct", ledger=Ledger(), turns=turns, end=end, error=error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "end", "value"),
    [
        (("<think>A?</think><answer>C</answer>",), End.ANSWERED, 1),
        (("<think>A?</think><answer>C",), End.LENGTH, 1),
        (("<answer>C</answer>", "<answer>B</answer>"), End.ANSWERED, 0),
        (("<think>Both C and",), End.LENGTH, 0),
        (("<answer>C</answer>",), End.ABORTED, 0),
        ((), End.CONTEXT_FULL, 0),
        (("",), End.NO_ANSWER, 0),
    ],
)
def test_the_score_of_an_episode(benchmark, task, texts, end, value):
    score = scorer(benchmark, "official")(episode(task, *texts, end=end), task)
    assert score.value == score.parts["accuracy"] == value


@pytest.mark.slow
def test_a_broken_episode_is_an_error_with_its_reason(benchmark, task):
    broken = episode(task, "<answer>C</answer>", end=End.ABORTED, error="the video can't be decoded")
    assert answer_of(broken).error == "the video can't be decoded"
    fine = episode(replace(task, id="another"), "<answer>C</answer>")
    scored = [Scored(episode=each, score=scorer(benchmark, "official")(each, task)) for each in (broken, fine)]
    found = report(benchmark, results_of(benchmark, scored))
    assert (found.n, found.errors, found.unparsed, found.score) == (2, 1, 0, 50)
