"""Statistics of calls per tool and per data source, against hand-computed numbers."""

from dataclasses import replace

import pytest
from evaluation_cases import make_scored, task

from saccade.metrics.episode_metrics import compute_step_metrics
from saccade.metrics.tool_metrics import compute_tool_metrics, list_calls
from saccade.types import Block, BlockKind, Call, CallFormat, Group, Reply, ToolResult, Turn


def make_call(name, **arguments):
    call = Call(name=name, arguments=arguments, call_format=CallFormat.NATIVE)
    return Block(kind=BlockKind.CALL, body="", is_closed=True, call=call)


def make_episode(calls, *, source="", value=0.0, results=None):
    """Return a scored episode with a turn of calls, each given as its name and arguments; all succeed by default."""
    scored = make_scored(replace(task("a"), extras={"data_source": source} if source else {}), 1.0, value=value)
    blocks = tuple(make_call(name, **arguments) for name, arguments in calls)
    results = results or tuple(ToolResult(text="x", was_executed=True, seconds=2.0) for _ in calls)
    turn = Turn(reply=Reply(text="", blocks=blocks), results=results)
    return replace(scored, episode=replace(scored.episode, turns=(turn, *scored.episode.turns)))


CROP = ("crop_video", {"start_time": 0, "end_time": 4})
OTHER_CROP = ("crop_video", {"start_time": 4, "end_time": 8})
PYTHON = ("python", {"code": "1"})


def test_statistics_per_tool():
    failed = (ToolResult(text="x", was_executed=True, seconds=1.0), ToolResult(error="no", seconds=4.0))
    metrics = compute_tool_metrics(
        [
            make_episode([CROP, OTHER_CROP, CROP, PYTHON], value=1.0),
            make_episode([CROP, OTHER_CROP], value=0.6, results=failed),
            make_episode([], value=0.2),
            make_episode([PYTHON], value=0.4),
        ]
    )
    crops = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("tool/crop_video/")}
    assert crops == {
        "calls": 5 / 4,
        "frac_with_call": 0.5,
        "frac_failed": 1 / 5,
        "frac_duplicate": 1 / 5,
        "seconds": pytest.approx((3 * 2 + 1 + 4) / 5),
        "reward_diff": pytest.approx(0.8 - 0.3),
    }
    assert metrics["tool/python/reward_diff"] == pytest.approx(0.7 - 0.4)
    assert not any(key.startswith("source/") for key in metrics)


def test_names_that_the_model_invents_are_one_key():
    refused = tuple(ToolResult(error="there is no such tool") for _ in range(3))
    metrics = compute_tool_metrics(
        [make_episode([CROP]), make_episode([("a", {}), ("b" * 500, {}), ("", {})], results=refused)]
    )
    assert {key.split("/")[1] for key in metrics} == {"crop_video", "other"}
    assert (metrics["tool/other/calls"], metrics["tool/other/frac_failed"]) == (1.5, 1.0)


def test_a_call_without_a_result_has_failed():
    episode = make_episode([CROP, CROP]).episode
    unanswered = replace(episode, turns=(replace(episode.turns[0], results=()),))
    assert [(record.has_failed, record.is_duplicate) for record in list_calls(unanswered)] == [
        (True, False),
        (True, True),
    ]


def test_statistics_per_source():
    scored = [
        make_episode([CROP, CROP], source="chart", value=1.0),
        make_episode([], source="chart", value=0.5),
        make_episode([PYTHON], source="vstar", value=0.5),
        make_episode([PYTHON]),
    ]
    metrics = compute_tool_metrics(scored)
    assert metrics["source/chart/calls"] == 1.0
    assert (
        metrics["source/chart/frac_with_call"]
        == metrics["source/chart/frac_duplicate"]
        == metrics["source/chart/reward_diff"]
        == 0.5
    )
    assert "source/vstar/reward_diff" not in metrics  # every episode called
    step = compute_step_metrics([Group(task=scored[0].episode.task, scored_episodes=tuple(scored))])
    assert step["source/chart/accuracy"] == 1.0
    assert metrics.items() <= step.items()


def test_no_call_and_no_source_have_no_metrics():
    assert compute_tool_metrics([make_episode([])]) == {}
