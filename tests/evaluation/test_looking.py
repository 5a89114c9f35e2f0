"""Where calls look, against numbers worked out by hand."""

from dataclasses import replace

import pytest
from evaluation_cases import make_scored, task
from hypothesis import given
from hypothesis import strategies as st

from saccade.ledger import ImageRef
from saccade.metrics.episode_metrics import compute_step_metrics, summarize
from saccade.metrics.looking import (
    NO_DECISION,
    average_policies,
    compute_looking,
    compute_looking_metrics,
    find_boxes_in_code,
    measure_union,
)
from saccade.types import Block, BlockKind, Call, CallFormat, Group, Reply, ToolResult, Turn, Usage

DONE = ToolResult(text="none", was_executed=True)


def make_turn(*arguments, results=None):
    calls = [Call(name="look", arguments=each, call_format=CallFormat.NATIVE) for each in arguments]
    blocks = tuple(Block(kind=BlockKind.CALL, body="", is_closed=True, call=call) for call in calls)
    return Turn(reply=Reply(text="", blocks=blocks), results=results or (DONE,) * len(calls))


def window(start, end):
    return {"start_time": start, "end_time": end}


def make_episode(*turns, extras=None, accuracy=1.0, visual_tokens=0):
    """Return a scored episode on a clip of 64 s whose needle is at 4 to 6 s."""
    of = task("a")
    scored = make_scored(replace(of, extras={**of.extras, **(extras or {})}), accuracy, value=accuracy)
    episode = replace(scored.episode, turns=turns, usage=Usage(visual_tokens=visual_tokens))
    return replace(scored, episode=episode)


def test_windows():
    episode = make_episode(make_turn(window(20, 30), window(25, 35)), make_turn(window(0, 5), window(6, 9))).episode
    looking = compute_looking(episode)
    assert [(look.turn, look.is_hit) for look in looking.looks] == [(0, False), (0, False), (1, True), (1, False)]
    assert looking.first_hit_turn == 2
    assert looking.evidence_recall == 1.0
    assert looking.coverage == pytest.approx((15 + 5 + 3) / 64)
    assert looking.overlap == pytest.approx(1 - (15 + 8) / (20 + 8))


def test_calls_that_were_not_run_or_have_no_window_are_left_out():
    refused = (ToolResult(error="no"), DONE)
    looking = compute_looking(make_episode(make_turn(window(4, 6), {"question": "?"}, results=refused)).episode)
    assert looking.looks == ()
    assert (looking.first_hit_turn, looking.evidence_recall, looking.coverage, looking.overlap) == (
        None,
        0.0,
        0.0,
        None,
    )


def test_boxes_of_crops_and_of_code():
    extras = {"evidence": [[32, 96, 64, 128]], "width": 320, "height": 320}
    crop = ImageRef(path="p", digest="d", time=None, width=16, height=16, box=(0, 80, 40, 100))
    shown = make_turn({"left": 0.0}, results=(ToolResult(images=(crop,), was_executed=True),))
    code = "for l, t, r, b in [(0.1, 0.3, 0.2, 0.4), (0.6, 0.3, 0.7, 0.4)]:\n    pass"
    looking = compute_looking(make_episode(shown, make_turn({"code": code}), extras=extras).episode)
    assert [look.is_hit for look in looking.looks] == [True, True]
    assert looking.looks[1].regions[0] == pytest.approx((32, 96, 64, 128))
    assert looking.coverage == pytest.approx((40 * 20 + 2 * 32 * 32 - 8 * 4) / 320**2)
    assert looking.overlap == 0.0


@pytest.mark.parametrize("code", ["(1, 2, 3", "f(1, 2, 3, 4)", "(4, 3, 2, 1)", "x = (a, b, c, d)", "\0", "(0.1,) * 4"])
def test_code_without_a_literal_box(code):
    assert list(find_boxes_in_code(code, task("a"))) == []


def test_code_with_odd_escapes_and_operators_gives_no_warning(recwarn):
    assert list(find_boxes_in_code('"\\d"; 1 is 2; [1, 2, 3, 4]', task("a"))) == [(1.0, 2.0, 3.0, 4.0)]
    assert not recwarn.list


@pytest.mark.parametrize("evidence", [None, [], "x", [[1]], [[3, 2]], [[0, 1], [0, 0, 1, 1]], [[0, float("nan")]]])
def test_tasks_without_valid_evidence_have_no_metrics(evidence):
    scored = make_episode(make_turn(window(4, 6)), extras={"evidence": evidence})
    assert compute_looking(scored.episode) is None
    assert compute_looking_metrics([scored], [1.0]) == {}


def test_metrics_over_episodes():
    extras = {"policies": {"oracle": [1.0, 1.0], NO_DECISION: [0.3, 2]}, "tool_call_penalty": 0.1}
    scored = [
        make_episode(make_turn(window(0, 8), window(8, 16)), extras=extras, visual_tokens=6),
        make_episode(make_turn(window(30, 40)), extras=extras, accuracy=0.0, visual_tokens=4),
    ]
    metrics = compute_looking_metrics(scored, [1.0, 0.0])
    assert metrics == {
        "looking/frac_calls_hit": pytest.approx(1 / 3),
        "looking/frac_episodes_hit": 0.5,
        "looking/first_hit_turn": 1.0,
        "looking/evidence_recall": 0.5,
        "looking/coverage": pytest.approx((16 + 10) / 64 / 2),
        "looking/overlap": 0.0,
        "looking/net_accuracy": pytest.approx((0.8 - 0.1) / 2),
        "looking/regret": pytest.approx(0.9 - (0.8 - 0.1) / 2),
        "looking/visual_tokens_per_correct": 10.0,
    }
    step = compute_step_metrics([Group(task=scored[0].episode.task, scored_episodes=(scored[0],))])
    assert step["looking/frac_calls_hit"] == 0.5
    summary = summarize(scored)
    assert summary.looking["regret"] == metrics["looking/regret"]
    assert summary.policies[NO_DECISION].accuracy == 0.3


def test_policies_of_all_tasks_or_of_none():
    with_policies = make_episode(
        extras={"policies": {"oracle": [1, 0.5], "broken": ["x", 1], "short": [1]}}
    ).episode.task
    assert set(average_policies([with_policies])) == {"oracle"}
    assert average_policies([with_policies, task("b")]) == {}
    assert average_policies([]) == {}


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=6))
def test_the_union_of_boxes_counts_each_cell_once(corners):
    boxes = [(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in corners]
    cells = {(x, y) for a, b, c, d in boxes for x in range(a, c) for y in range(b, d)}
    assert measure_union(boxes) == len(cells)
