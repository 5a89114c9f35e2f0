"""Evaluation through the rollout path: durable, resumable, the same whatever happened on the way."""

import asyncio
from functools import partial

import pytest
from evaluation_cases import task

from saccade.agents.direct import direct
from saccade.agents.parallel import parallel
from saccade.config import Evaluation, Term
from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, RunError
from saccade.evaluation.run import choose, deal, evaluate, read_records, read_results
from saccade.protocols import Context
from saccade.rewards._compose import compose
from saccade.testing import PaintedMedia
from saccade.types import End, Kind, Media, Sampling, Task

TASKS = [task(f"w-{i}", question=("at", "when")[i % 2]) for i in range(8)]
CALL = 'Look.</think><tool_call>{"name":"crop_video","arguments":{"start_time":0,"end_time":8}}</tool_call>'
SCORE = compose({"accuracy": Term()})


class counting(scripted):
    """Says "red" or "blue" by the seed; counts what it was asked; may die after some replies."""

    asked = 0
    temperatures = frozenset()
    lives = 10**6

    async def generate(self, ledger, sampling):
        self.asked += 1
        self.temperatures |= {sampling.temperature}
        if self.asked > self.lives:
            raise KeyboardInterrupt
        self._replies = lambda ledger: f"I see.</think><answer>{('red', 'blue')[sampling.seed % 2]}</answer>"
        return await super().generate(ledger, sampling)


def run(renderer, path, *, engine=None, tasks=TASKS, agent=parallel, media=None, **settings):
    engine = engine or counting(renderer)
    given = {key: settings.pop(key) for key in ("identity", "on_done", "at_once") if key in settings}
    base = Context(
        engine=engine, renderer=renderer, media=media or PaintedMedia(), sampling=Sampling(max_tokens=200), seed=7
    )
    settings = Evaluation(**{"frames": (4, 8), "temperature": 0.6, **settings})
    return asyncio.run(evaluate(tasks, agent=agent, base=base, score=SCORE, settings=settings, path=path, **given))


def bare(results):
    return [(each.episode.task.id, each.episode.frames, each.episode.answer, each.score) for each in results]


def test_results_come_in_the_order_of_tasks_and_attempts_and_lie_in_the_file(renderer, tmp_path):
    seen = []
    engine = counting(renderer)
    found = run(
        renderer, tmp_path / "e" / "all.jsonl", engine=engine, repeat=2, on_done=lambda *done: seen.append(done)
    )
    assert [each.episode.task.id for each in found] == [each.id for each in TASKS for _ in range(2)]
    assert seen == [(i + 1, 8) for i in range(8)]
    assert engine.temperatures == {0.6}
    records = read_records(tmp_path / "e" / "all.jsonl")
    assert len({record.key for record in records}) == 16
    assert {each.score.value for each in found} == {0.0, 1.0}
    assert sorted(bare(read_results(tmp_path / "e" / "all.jsonl")), key=str) == sorted(bare(found), key=str)


def test_a_rerun_asks_the_engine_nothing_and_returns_the_same(renderer, tmp_path):
    first = run(renderer, tmp_path / "a.jsonl")
    engine = counting(renderer)
    assert run(renderer, tmp_path / "a.jsonl", engine=engine) == first
    assert engine.asked == 0


@pytest.mark.parametrize("lives", [1, 5, 9])
def test_a_killed_evaluation_goes_on_where_it_stopped(renderer, tmp_path, lives):
    whole = run(renderer, tmp_path / "whole.jsonl", repeat=2)
    dying, path = counting(renderer), tmp_path / "killed.jsonl"
    dying.lives = lives
    with pytest.raises(KeyboardInterrupt):
        run(renderer, path, engine=dying, repeat=2, at_once=2)
    if path.exists():  # the kill came in the middle of a line
        path.write_bytes(path.read_bytes() + b'{"task":"x","fra')
    engine = counting(renderer)
    done = len(read_records(path)) if path.exists() else 0
    assert bare(run(renderer, path, engine=engine, repeat=2)) == bare(whole)
    assert engine.asked == 16 - done


def test_more_repeats_keep_what_is_there(renderer, tmp_path):
    once = run(renderer, tmp_path / "a.jsonl")
    twice = run(renderer, tmp_path / "a.jsonl", repeat=2)
    assert twice[::2] == once
    assert len(read_records(tmp_path / "a.jsonl")) == 16


def test_a_smaller_part_done_first_is_a_part_of_the_whole(renderer, tmp_path):
    part = run(renderer, tmp_path / "a.jsonl", limit=3)
    whole = run(renderer, tmp_path / "a.jsonl")
    assert len(read_records(tmp_path / "a.jsonl")) == 8
    assert all(each in whole for each in part)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"frames": (4,)}, {"tools": False}, {"identity": {"weights": "other"}}]
)
def test_results_of_other_settings_are_not_mixed_in(renderer, tmp_path, change):
    run(renderer, tmp_path / "a.jsonl")
    with pytest.raises(RunError, match="other settings, weights or seed"):
        run(renderer, tmp_path / "a.jsonl", **change)


def test_frame_budgets_are_dealt_evenly_within_each_question_kind():
    budgets = deal(TASKS, (4, 8))
    for kind in ("at", "when"):
        dealt = sorted(budgets[each.id] for each in TASKS if each.extras["question"] == kind)
        assert dealt == [4, 4, 8, 8]
    assert deal(TASKS[::-1], (4, 8)) == budgets
    assert set(deal(TASKS, ()).values()) == {None}


def test_the_prompt_shows_the_budget_that_was_dealt(renderer, tmp_path):
    budgets = deal(TASKS, (4, 8))
    for each in run(renderer, tmp_path / "a.jsonl"):
        assert each.episode.frames == budgets[each.episode.task.id]
        assert len(each.episode.ledger.segments[0].slots) == each.episode.frames


def test_a_limit_takes_the_same_tasks_whatever_their_order():
    few = choose(TASKS, 3)
    assert {each.id for each in few} == {each.id for each in choose(TASKS[::-1], 3)}
    assert [each.id for each in few] == [each.id for each in TASKS if each in few]
    assert choose(TASKS, 0) == TASKS


def test_with_the_tools_off_no_call_is_executed(renderer, tmp_path):
    replies = [CALL, "Now.</think><answer>red</answer>"] * 8
    engine = scripted(renderer, replies=lambda ledger: replies[len(ledger.segments) // 3 % 2])
    found = run(renderer, tmp_path / "a.jsonl", engine=engine, tools=False)
    assert all(each.episode.end is End.ANSWERED for each in found)
    assert not any(result.executed for each in found for result in each.episode.results)


def test_an_agent_without_tools_can_not_have_them_taken_away(renderer, tmp_path):
    with pytest.raises(ConfigError, match="needs an agent with a setting `tools`"):
        run(renderer, tmp_path / "a.jsonl", agent=partial(direct), tools=False)


def test_a_missing_video_is_a_row_that_scores_nothing(renderer, tmp_path):
    gone = Task(id="gone", question="?", media=(Media(path="missing.mp4"),), kind=Kind.OPEN, gold="red")
    found = run(renderer, tmp_path / "a.jsonl", tasks=[*TASKS[:2], gone])
    assert [each.episode.end for each in found][-1] is End.ABORTED
    assert "missing.mp4" in found[-1].episode.error
    assert found[-1].score.parts["accuracy"] == 0.0
