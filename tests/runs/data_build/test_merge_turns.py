"""Which turns become one; every pair of turns differs from a mergeable one in one respect."""

import json
from dataclasses import replace

import pytest

from saccade.chat.parser import parse_reply
from saccade.runs.data_build.demonstrations import DemonstrationTurn, merge_turns

QUESTION = "Which color follows red?\nA. blue\nB. green"


def make_turn(*calls, results=None, thinking="I look."):
    bodies = [
        json.dumps({"name": name, "arguments": arguments})
        for name, arguments in (call if isinstance(call, tuple) else ("crop_video", call) for call in calls)
    ]
    text = f"<think>\n{thinking}\n</think>\n" + "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)
    results = results or ["It is gray."] * len(calls)
    return DemonstrationTurn(
        text=text,
        calls=parse_reply(text).calls,
        call_bodies=tuple(bodies),
        results=tuple(results),
        children=tuple(results),
    )


def crop(start, end, question="Which color?"):
    return {"start_time": start, "end_time": end, "question": question}


ANSWER = DemonstrationTurn(text="<think>\nI know.\n</think>\n<answer>A</answer>")


def test_a_sweep_becomes_one_turn_whose_calls_and_children_stay_in_order():
    sweep = [make_turn(crop(4 * i, 4 * i + 4), results=[f"Color {'abc'[i]}"], thinking=f"Part {i}.") for i in range(3)]
    merged = merge_turns([*sweep, ANSWER], QUESTION, max_calls_per_turn=5)
    assert merged[1] == ANSWER
    assert merged[0].children == ("Color a", "Color b", "Color c")
    reply = parse_reply(merged[0].text)
    assert [call.arguments["start_time"] for call in reply.calls] == [0, 4, 8]
    assert all(call.ok for call in reply.calls)
    assert "Part 0." in reply.text
    assert "Part 1." not in reply.text


def test_the_limit_of_calls_starts_a_new_turn():
    sweep = [make_turn(crop(i, i + 1)) for i in range(5)]
    assert [len(turn.calls) for turn in merge_turns(sweep, QUESTION, max_calls_per_turn=2)] == [2, 2, 1]
    assert merge_turns(sweep, QUESTION, max_calls_per_turn=1) == sweep


FIRST, SECOND = make_turn(crop(0, 4)), make_turn(crop(4, 8))


def test_the_pair_that_the_others_differ_from_is_merged():
    assert len(merge_turns([FIRST, SECOND], QUESTION, max_calls_per_turn=5)) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, make_turn(crop(2, 6))),  # overlaps what was seen
        (make_turn(crop(0, 4), results=["A man leaves at 6 seconds."]), SECOND),  # a time inside the window
        (make_turn(crop(0, 4), results=["He leaves at 00:06."]), SECOND),
        (make_turn(crop(0, 4), results=["A dog appears."]), make_turn(crop(4, 8, "What does the dog do?"))),
        (FIRST, make_turn(("show_frames", {"times": [5]}))),  # no window
        (make_turn(("zoom", {"box": [0, 0, 1, 1]})), SECOND),
        (make_turn(crop(0, 4), crop(8, 12)), make_turn(crop(4, 8), crop(9, 10))),
        (FIRST, make_turn(crop("soon", 8))),
        (replace(FIRST, children=()), SECOND),
        (FIRST, replace(SECOND, children=())),
        (ANSWER, SECOND),
    ],
)
def test_dependent_turns_stay_apart(first, second):
    assert merge_turns([first, second], QUESTION, max_calls_per_turn=5) == [first, second]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (make_turn(crop(0, 4), results=["A dog appears at 2 seconds."]), SECOND),  # a time outside the window
        (
            make_turn(crop(0, 4), results=["It is blue."]),
            make_turn(crop(4, 8, "Is blue shown?")),
        ),  # the question's word
        (make_turn(crop(0, 4, "Is a dog there?"), results=["A dog."]), make_turn(crop(4, 8, "Is a dog there?"))),
        (make_turn(crop(0, 4), results=["It was there."]), make_turn(crop(4, 8, "What is there?"))),  # function words
        (make_turn(crop(8, 12)), make_turn(crop(0, 8))),  # touching, in any order
    ],
)
def test_what_the_model_knew_before_is_no_dependency(first, second):
    assert len(merge_turns([first, second], QUESTION, max_calls_per_turn=5)) == 1


def test_a_turn_that_depends_is_not_skipped_over():
    dependent = make_turn(crop(1, 3))
    merged = merge_turns([FIRST, dependent, SECOND], QUESTION, max_calls_per_turn=5)
    assert [len(turn.calls) for turn in merged] == [1, 2]
