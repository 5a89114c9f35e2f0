"""Evaluation through the rollout path: durable, resumable, the same whatever happened on the way."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from evaluation_cases import task

from saccade.agents.direct import direct
from saccade.agents.parallel import parallel
from saccade.config import Evaluation, Term
from saccade.data.world.film import write_clip
from saccade.engines.scripted import scripted
from saccade.errors import ConfigError, EngineError, RunError
from saccade.evaluation.metrics import failed
from saccade.evaluation.portions import deal
from saccade.evaluation.run import evaluate, read_records, read_results, read_ungraded
from saccade.media.cache import Library
from saccade.protocols import Context
from saccade.rewards._compose import compose
from saccade.testing import PaintedMedia
from saccade.types import End, Kind, Media, Sampling, Task, Ungraded

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
    passed = ("identity", "on_done", "at_once", "score", "portion", "root")
    given = {key: settings.pop(key) for key in passed if key in settings}
    sampling, seed = Sampling(max_tokens=settings.pop("max_tokens", 200)), settings.pop("seed", 7)
    base = Context(engine=engine, renderer=renderer, media=media or PaintedMedia(), sampling=sampling, seed=seed)
    settings = Evaluation(**{"frames": (4, 8), "temperature": 0.6, **settings})
    return asyncio.run(
        evaluate(tasks, agent=agent, base=base, settings=settings, path=path, **{"score": SCORE, **given})
    )


def bare(results):
    return [(each.episode.task.id, each.episode.frames, each.episode.answer, each.score) for each in results]


def test_results_come_in_the_order_of_tasks_and_attempts_and_lie_in_the_file(renderer, tmp_path):
    seen = []
    engine = counting(renderer)
    found = run(renderer, tmp_path / "e" / "all.jsonl", engine=engine, repeat=2, on_done=seen.append)
    assert [each.episode.task.id for each in found] == [each.id for each in TASKS for _ in range(2)]
    assert [(each.done, each.total) for each in seen] == [(2 * i, 16) for i in range(9)]
    assert seen[0].remark == ""
    assert seen[-1].accuracy == sum(each.score.parts["accuracy"] for each in found) / 16
    assert seen[-1].remark == f"accuracy {seen[-1].accuracy:.3f}"
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
    ("change", "what"),
    [
        ({"temperature": 0.0}, "settings"),
        ({"frames": (4,)}, "settings"),
        ({"tools": False}, "settings"),
        ({"max_tokens": 100}, "settings"),
        ({"seed": 8}, "seed"),
        ({"identity": {"weights": "other", "agent": "this"}}, "weights"),
        ({"identity": {"weights": "other", "agent": "that"}}, "weights and agent"),
    ],
)
def test_results_of_other_settings_are_not_mixed_in(renderer, tmp_path, change, what):
    path, this = tmp_path / "a.jsonl", {"weights": "these", "agent": "this"}
    run(renderer, path, identity=this)
    before = path.read_bytes()
    with pytest.raises(RunError, match=f"holds results of other {what}; delete it or give this evaluation another"):
        run(renderer, path, **{"identity": this, **change})
    assert path.read_bytes() == before


def film(path, shade):
    write_clip(path, np.full((16, 32, 32, 3), shade, np.uint8), 4.0)
    return str(path)


def test_another_video_of_the_same_name_is_attempted_anew(renderer, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    film(tmp_path / "a" / "clip.mp4", 90), film(tmp_path / "b" / "clip.mp4", 90), film(tmp_path / "c.mp4", 200)

    def attempts(folder):
        here = [replace(each, media=(Media(path=str(tmp_path / folder / "clip.mp4")),)) for each in TASKS[:3]]
        engine = counting(renderer)
        found = run(renderer, tmp_path / "e.jsonl", engine=engine, tasks=here, media=Library())
        assert len(read_results(tmp_path / "e.jsonl")) == len(found) == 3  # an older video's results are not counted
        return engine.asked

    assert attempts("a") == 3
    assert attempts("b") == 0  # the same video elsewhere
    (tmp_path / "c.mp4").rename(tmp_path / "b" / "clip.mp4")
    assert attempts("b") == 3
    assert attempts("b") == 0


def test_a_video_that_was_missing_counts_once_it_is_there(renderer, tmp_path):
    here = [replace(TASKS[0], media=(Media(path=str(tmp_path / "clip.mp4")),))]
    (gone,) = run(renderer, tmp_path / "e.jsonl", tasks=here, media=Library())
    assert gone.episode.end is End.ABORTED
    film(tmp_path / "clip.mp4", 90)
    found = run(renderer, tmp_path / "e.jsonl", tasks=here, media=Library())
    assert [each.episode.end for each in found] == [End.ANSWERED]
    assert read_results(tmp_path / "e.jsonl") == found


def test_the_prompt_shows_the_budget_that_was_dealt(renderer, tmp_path):
    budgets = deal(TASKS, (4, 8))
    for each in run(renderer, tmp_path / "a.jsonl"):
        assert each.episode.frames == budgets[each.episode.task.id]
        assert len(each.episode.ledger.segments[0].slots) == each.episode.frames


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


class shaky(counting):
    """Like `counting`, but fails at some of its requests."""

    failing = frozenset()

    async def generate(self, ledger, sampling):
        if self.asked in self.failing:
            self.asked += 1
            raise EngineError("the server went away")
        return await super().generate(ledger, sampling)


def test_what_broke_is_tried_again_and_nothing_else(renderer, tmp_path):
    whole, path = run(renderer, tmp_path / "whole.jsonl"), tmp_path / "a.jsonl"
    first = shaky(renderer)
    first.failing = {1, 4, 6}
    broken = run(renderer, path, engine=first)
    assert sum(each.episode.end is End.ABORTED for each in broken) == 3
    assert sum(failed(each.episode) for each in read_results(path)) == 3  # a report counts what stayed broken
    second = shaky(renderer)
    second.failing = {2}
    run(renderer, path, engine=second)
    assert second.asked == 3
    assert sum(failed(each.episode) for each in read_results(path)) == 1
    third = counting(renderer)
    assert bare(run(renderer, path, engine=third)) == bare(whole)
    assert third.asked == 1
    assert len(path.read_bytes().splitlines()) == 8 + 3 + 1
    assert sorted(bare(read_results(path)), key=str) == sorted(bare(whole), key=str)  # a superseded line is not read


def test_a_sub_agents_broken_engine_is_tried_again(renderer, tmp_path):
    """The main agent calls; its sub-agent's engine fails: the tool is broken, not the model."""

    class gone(scripted):
        async def generate(self, ledger, sampling):
            if len(ledger.segments) == 1:
                raise EngineError("the server went away")
            return await super().generate(ledger, sampling)

    path = tmp_path / "a.jsonl"
    (lost,) = run(renderer, path, engine=gone(renderer, replies=lambda ledger: CALL), tasks=TASKS[:1])
    assert lost.episode.end is End.TOOL_BROKEN
    (found,) = run(renderer, path, tasks=TASKS[:1])
    assert found.episode.end is End.ANSWERED


def test_one_broken_attempt_of_several_is_made_again_alone_in_the_file(renderer, tmp_path):
    path, engine = tmp_path / "a.jsonl", shaky(renderer)
    engine.failing = {1}
    before = run(renderer, path, engine=engine, tasks=TASKS[:1], repeat=3)
    after = run(renderer, path, tasks=TASKS[:1], repeat=3)
    assert [each.episode.end for each in before].count(End.ABORTED) == 1
    assert len(path.read_bytes().splitlines()) == 4
    assert [old == new for old, new in zip(before, after, strict=True)].count(False) == 1


def test_what_nobody_could_grade_is_left_out_counted_and_tried_again(renderer, tmp_path):
    path, silent = tmp_path / "a.jsonl", []

    def judge(episode, task):
        silent.append(task.id)
        return Ungraded(reason="the judge didn't answer") if len(silent) in (2, 5) else SCORE(episode, task)

    before = run(renderer, path, tasks=TASKS[:2], repeat=3, score=judge)
    assert len(before) == len(read_results(path)) == 4
    lost = read_ungraded(path)
    assert [each.reason for each in lost] == ["the judge didn't answer"] * 2
    after = run(renderer, path, tasks=TASKS[:2], repeat=3)
    assert bare(after) == bare(run(renderer, tmp_path / "whole.jsonl", tasks=TASKS[:2], repeat=3))
    assert read_ungraded(path) == []
    assert all(each in after for each in before)


CHOICES = [
    Task(id=f"c-{i}", question="Which?", media=(Media(path="clip.mp4"),), kind=Kind.CHOICE, gold="A", choices=words)
    for i, words in enumerate([("red", "blue", "green"), ("red", "blue", "both A and B")])
]


@pytest.mark.parametrize("said", ["red", "A"])
def test_shuffled_options_are_attempts_at_the_same_task_and_marked_by_their_own_order(renderer, tmp_path, said):
    tasks, path = [*CHOICES, TASKS[0]], tmp_path / "a.jsonl"
    engine = scripted(renderer, replies=lambda ledger: f"So.</think><answer>{said}</answer>")
    found = run(renderer, path, engine=engine, tasks=tasks, repeat=6, shuffle_options=True)
    assert [each.episode.task.id for each in found] == [each.id for each in tasks for _ in range(6)]
    asked = [each.episode.task for each in found]
    assert len({each.choices for each in asked[:6]}) > 1
    assert {each.choices for each in asked[6:12]} == {CHOICES[1].choices}
    right = [(each.gold if said == "A" else each.choices[ord(each.gold) - 65]) == said for each in asked[:12]]
    assert [each.score.parts["accuracy"] == 1 for each in found[:12]] == right
    assert [record.repeat for record in read_records(path)] == [*range(6)] * 3
    again = counting(renderer)
    assert run(renderer, path, engine=again, tasks=tasks, repeat=6, shuffle_options=True) == found
    assert again.asked == 0
    with pytest.raises(RunError, match="results of other settings"):
        run(renderer, path, tasks=tasks, repeat=6)


def test_attempts_with_shuffled_options_sample_on_their_own(renderer, tmp_path):
    found = run(renderer, tmp_path / "a.jsonl", tasks=[TASKS[0]], repeat=12, shuffle_options=True)
    assert len({each.episode.answer for each in found}) == 2  # red and blue, by the seed
