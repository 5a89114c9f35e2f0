import asyncio
from dataclasses import replace

import pytest
from reward_cases import RAN, answer, call, episode, stray, text, think, turn

from saccade.config.schema import RewardTerm
from saccade.rewards.compose import compose_rewards
from saccade.rewards.format_compliance import format_compliance
from saccade.rewards.format_reward import format_reward as format_reward
from saccade.types import CallFormat, Credit, Score, Span

TAGS = Span(kind="tags")
FLOW = turn(think(), answer())
LOOK = turn(think(), call(), results=[RAN])


def grade(*turns, **settings):
    return replace(format_reward(episode(*turns), **settings), reason="")


def score(*turns, **settings):
    return format_reward(episode(*turns), **settings).value


def test_reference_values():
    uncapped = 0.7 + 0.5 * 0.7 + 0.1
    assert uncapped == pytest.approx(1.15)
    assert score(FLOW) == 1.0
    assert score(turn(stray(), think(), answer())) == 1.0  # 1.05 without the balance bonus
    assert score(turn(think("hm", closed=False), answer())) == pytest.approx(0.35)
    assert score(turn(think(closed=False), answer())) == pytest.approx(0.55)


def test_vanilla_has_no_anchor():
    assert score(FLOW, anchor_weight=0.0) == pytest.approx(0.8)
    assert score(LOOK, FLOW, anchor_weight=0.0) == 1.0
    assert score(turn(think("hm", closed=False), answer()), anchor_weight=0.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((), 0.0),
        ((turn(text("red")),), 0.0),  # no bonus for balance alone
        ((turn(answer()),), 0.3 + 0.2 + 0.1),
        ((turn(answer(closed=False)),), 0.0),  # opened and never closed
        ((turn(answer("  ")),), 0.0),
        ((turn(think()),), 0.2 + 0.5 * 0.4 + 0.1),
        ((turn(think("")),), 0.0),
        ((turn(think(""), answer()),), 0.3 + 0.2 + 0.1),  # an empty think is no flow
        ((turn(think("hm"), answer()),), 0.5 + 0.5 * 0.3 + 0.1),
        ((turn(think("123456789"), answer()),), 0.5 + 0.5 * 0.3 + 0.1),
        ((turn(think(closed=False)),), 0.2 - 0.15),
        ((turn(think("", closed=False)),), -0.15),
        ((turn(answer(), think()),), 0.7 + 0.5 * 0.4 + 0.1),  # an answer before the think is no flow
        ((turn(think(), call()),), 0.5 + 0.5 * 0.4 + 0.1),
        ((turn(think(), call(error="bad JSON")),), 0.2 + 0.5 * 0.4 + 0.1),
        ((turn(think(), call(form=CallFormat.PYTHON_STYLE)),), 0.5 + 0.5 * 0.4 + 0.1),
        ((turn(call(), think()),), 0.2 + 0.5 * 0.4 + 0.1),  # a call before the think
        ((turn(think()), turn(call())), 0.2 + 0.5 * 0.4 + 0.1),  # a think of another turn
        ((LOOK, turn(think(closed=False), answer())), 1.0 - 0.15),  # left open in any turn
        ((turn(think(), answer(closed=False)),), 0.2 + 0.5 * 0.4),
    ],
)
def test_base_and_anchor_by_hand(turns, expected):
    assert score(*turns) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("turns", "value", "anchor"),
    [
        ((FLOW,), 0.7 + 0.1, 0.5 * 0.7),
        ((LOOK, FLOW), 1.0, 0.5 * 0.7),  # 0.2 + 0.5 + 0.3 + 0.1, capped
        ((turn(think("hm", closed=False), answer()),), 0.5, -0.15),
        ((turn(think(closed=False), answer()),), 0.7, -0.15),
        ((turn(think("", closed=False)),), 0.0, -0.15),
        ((turn(text("red")),), 0.0, 0.0),
    ],
)
def test_separate_anchor(turns, value, anchor):
    separate = grade(*turns, anchor_credit="tokens")
    assert separate == Score(value=pytest.approx(value), credits=(Credit(span=TAGS, value=pytest.approx(anchor)),))
    assert score(*turns) == pytest.approx(min(1.0, value + anchor))
    assert grade(*turns, anchor_credit="tokens", anchor_weight=0.0).credits == (Credit(span=TAGS, value=0.0),)


def test_separate_anchor_in_a_composed_score():
    terms = {
        "accuracy": RewardTerm(is_accuracy=True),
        "format_reward": RewardTerm(weight=0.5, settings={"anchor_credit": "tokens"}),
    }
    [composed] = asyncio.run(compose_rewards(terms)([episode(FLOW)]))
    assert composed.value == pytest.approx(1.0 + 0.5 * 0.8)
    assert composed.parts == pytest.approx({"accuracy": 1.0, "format_reward": 0.8, "format_compliance": 1.0})
    terms["format_reward"] = RewardTerm(weight=0.5)
    assert asyncio.run(compose_rewards(terms)([episode(FLOW)]))[0].credits == ()


def test_without_the_answer_suffix():
    assert score(FLOW, anchor_weight=0.0, answer_suffix=False) == pytest.approx(0.3 + 0.2 + 0.1 + 0.1)
    assert score(turn(answer(closed=False)), anchor_weight=0.0, answer_suffix=False) == 0.0


def test_ablation_of_gamma():
    assert score(turn(think(closed=False), answer()), gamma=0.0) == pytest.approx(0.7)


def test_prefilled_think_counts_unless_hidden():
    prefixed = turn(think(), answer(), forced="<think>\n")
    assert score(prefixed) == 1.0
    assert score(prefixed, count_prefilled_think=False) == pytest.approx(0.5)  # `</think>` closes nothing
    assert score(FLOW, count_prefilled_think=False) == 1.0
    left_open = turn(think(closed=False), answer(), forced="<think>\n")
    assert score(left_open) == pytest.approx(0.55)
    assert score(left_open, count_prefilled_think=False) == pytest.approx(0.6)


WELL_FORMED = [
    FLOW,
    LOOK,
    turn(think(""), answer()),
    turn(think(), text("\n"), call(), text(" "), call(), text("\n")),
    turn(think(), answer(), forced="<think>\n"),
    turn(think("To answer I write <answer></answer>."), answer()),
]
ILL_FORMED = [
    turn(),
    turn(answer()),
    turn(call()),
    turn(think()),
    turn(think(), text("so"), answer()),
    turn(text("so"), think(), answer()),
    turn(think(), answer(), text("5555")),
    turn(think(), stray(), answer()),
    turn(think(), think(), answer()),
    turn(think(closed=False), answer()),
    turn(think(), answer(" ")),
    turn(think(), answer(closed=False)),
    turn(think(), answer(), answer()),
    turn(think(), call(), answer()),
    turn(think(), call(error="bad JSON")),
    turn(think(), call(), call(error="bad JSON")),
    turn(think(), call(form=CallFormat.PYTHON_STYLE)),
    turn(think(), call(closed=False)),
    turn(think("I open <tool_call> here"), answer()),
    turn(think(), answer("red</think>")),
    turn(think(), answer("<think>It was red.</think>red")),
    turn(think(), answer('<tool_call>{"name": "crop_video"}</tool_call>')),
]


@pytest.mark.parametrize("good", WELL_FORMED)
def test_grammar_accepts(good):
    assert score(good, mode="grammar") == format_compliance(episode(good)).value == 1.0


@pytest.mark.parametrize("bad", ILL_FORMED)
def test_grammar_rejects(bad):
    assert score(bad, mode="grammar") == format_compliance(episode(bad)).value == 0.0
    assert score(LOOK, bad, mode="grammar") == 0.5
    assert format_compliance(episode(LOOK, bad)).value == 0.0


def test_anchor_rewards_what_the_grammar_rejects():
    collapsed = turn(think(), stray(), answer("yellow"), text("5555"))
    assert score(collapsed) == 1.0
    assert score(collapsed, mode="grammar") == 0.0


def test_a_quoted_tag_costs_the_balance_bonus():
    assert score(turn(think("I open <tool_call> here"), answer()), anchor_weight=0.0) == pytest.approx(0.7)


def test_episode_without_turns_is_not_compliant():
    assert format_compliance(episode()).value == score(mode="grammar") == 0.0
