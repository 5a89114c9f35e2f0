import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.chat.parser import parse_reply
from saccade.types import BlockKind, CallFormat

CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 3, "end_time": 9}}</tool_call>'
TAGS = [f"<{slash}{name}>" for name in ("think", "tool_call", "tool_code", "answer") for slash in ("", "/")]
SNIPPETS = [
    *TAGS,
    CALL,
    '{"name": "a", "arguments": {"b": NaN}}',
    '{"name": "a", "arguments": {}}',
    "print(crop_video(1, end_time=2))",
    "f(",
    "[" * 300,
    "-" * 2000 + "1",
    "\\ud800",
    "\x00",
    "\n",
    " ",
]
ANY_TEXT = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=12)), max_size=12).map("".join)


def get_kinds(text):
    return [block.kind.value for block in parse_reply(text).blocks]


def get_bodies(text, kind):
    return [block.body for block in parse_reply(text).find_blocks(kind)]


def parse_single_call(body, tag="tool_call"):
    (call,) = parse_reply(f"<{tag}>{body}</{tag}>").calls
    return call


def test_blocks_come_in_order():
    text = f"<think>\nLook.</think>\n{CALL}\n{CALL} so <answer>red</answer>"
    reply = parse_reply(text, len("<think>\n"))
    assert get_kinds(text) == ["think", "call", "call", "text", "answer"]
    assert reply.prefill == "<think>\n"
    assert reply.text == text
    assert reply.answer == "red"
    assert reply.calls[0].arguments == {"start_time": 3, "end_time": 9}
    assert all(block.is_closed for block in reply.blocks)


def test_an_answer_in_a_closed_think_is_ignored():
    reply = parse_reply("<think>maybe <answer>red</answer>?</think><answer>blue</answer>")
    assert reply.answer == "blue"
    assert parse_reply("<think>maybe <answer>red</answer>?</think>").answer is None


def test_an_answer_after_an_unclosed_think_counts():
    reply = parse_reply("<think>It was red. <answer>red</answer>")
    assert [(block.kind, block.is_closed) for block in reply.blocks] == [
        (BlockKind.THINK, False),
        (BlockKind.ANSWER, True),
    ]
    assert reply.blocks[0].body == "It was red. "
    assert reply.answer == "red"


def test_an_unclosed_or_blank_answer_is_none():
    assert parse_reply("<answer>red").answer is None
    assert parse_reply("<answer>red<answer>blue</answer>").answer == "blue"
    assert parse_reply("<answer> </answer>").answer is None


def test_a_malformed_call_does_not_affect_other_calls():
    text = f"<tool_call>{{bad</tool_call>{CALL}<tool_call>cut {CALL}<tool_call>open"
    calls = parse_reply(text).calls
    assert [call.ok for call in calls] == [False, True, False, True, False]


def test_closing_tags_outside_blocks_are_unmatched():
    assert get_kinds("</think>a</answer><think>b</think></think>") == [
        "unmatched_tag",
        "text",
        "unmatched_tag",
        "think",
        "unmatched_tag",
    ]
    assert get_bodies("x</tool_call>", BlockKind.UNMATCHED_TAG) == ["</tool_call>"]


def test_tags_inside_a_closed_block_belong_to_its_body():
    question = '{"name": "crop_video", "arguments": {"question": "is <answer>red</answer> or <think> shown?"}}'
    reply = parse_reply(f"<tool_call>{question}</tool_call>")
    assert get_kinds(reply.text) == ["call"]
    assert reply.calls[0].arguments["question"] == "is <answer>red</answer> or <think> shown?"
    assert reply.answer is None


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("crop_video(start_time=3, end_time=9.5)", {"start_time": 3, "end_time": 9.5}),
        (" print(crop_video(3, -9, question='a\\nb')) ", {"0": 3, "1": -9, "question": "a\nb"}),
        ("crop_video(window=(1, 2), names=['a'], box={'x': None}, on=True)",
         {"window": [1, 2], "names": ["a"], "box": {"x": None}, "on": True}),
        ("crop_video()", {}),
    ],
)  # fmt: skip
def test_python_style_calls(source, arguments):
    call = parse_single_call(source, "tool_code")
    assert (call.name, call.call_format, call.error) == ("crop_video", CallFormat.PYTHON_STYLE, None)
    assert call.arguments == arguments


@pytest.mark.parametrize(
    "source",
    ["", "crop_video", "a.b(1)", "f(x)", "f(*[1])", "f(**{})", "f(1)\nf(2)", "f(1j)", "f({1})", "f({1: 2})", "f(b'a')",
     "f(a=1, a=2)", "f(1e999)", "f(...)", "f(f(1))", "print(f(1), f(2))", "print(1)", "x = f(1)", "__import__('os')()",
     "(" * 4000, "f(" + "-" * 4000 + "1)", "f(" + "[" * 1500 + "]" * 1500 + ")", "f('\\ud800')", "f('\x00')",
     "f(" * 9999],
)  # fmt: skip
def test_invalid_python_style_calls_have_an_error(source):
    call = parse_single_call(source, "tool_code")
    assert not call.ok
    assert not call.arguments
    assert "0x" not in call.error


@pytest.mark.parametrize(
    "body",
    ["", "{}", "[]", "null", '{"name": "a"}', '{"name": 3, "arguments": {}}', '{"name": " ", "arguments": {}}',
     '{"name": "a", "arguments": []}', '{"name": "a", "arguments": "{}"}', '{"name": "a", "arguments": {"b": NaN}}',
     '{"name": "a", "arguments": {"b": -Infinity}}', '{"name": "a", "arguments": {"b": 1e999}}',
     '{"name": "a", "arguments": {"b": 99999999999999999999}}', '{"name": "a", "arguments": {"b": ' + "9" * 6000 + "}}",
     '{"name": "a", "arguments": {"b": 1, "b": 2}}', '{"name": "a", "name": "a", "arguments": {}}',
     '{"name": "a", "arguments": {"b": "\\ud800"}}', "[" * 100_000,
     '{"name": "a", "arguments": ' + '{"b":' * 20 + "1" + "}" * 21, '{"name": "a", "arguments": {}} extra'],
)  # fmt: skip
def test_invalid_native_calls_have_an_error(body):
    call = parse_single_call(body)
    assert (call.ok, call.name, call.arguments, call.call_format) == (False, "", {}, CallFormat.NATIVE)
    assert call.error


@pytest.mark.slow
@given(ANY_TEXT, st.integers(-3, 400))
def test_parsing_never_raises_and_loses_only_tags(text, prefill_length):
    reply = parse_reply(text, prefill_length)
    assert reply.text == text
    assert text.startswith(reply.prefill)
    position = 0
    for block in reply.blocks:  # every body is a part of the text, in order
        position = text.index(block.body, position) + len(block.body)
        assert (block.kind is BlockKind.CALL) == (block.call is not None)
    for call in reply.calls:
        json.dumps(call.arguments, allow_nan=False).encode()
        assert call.ok or (call.error and not call.arguments)


@pytest.mark.slow
@given(ANY_TEXT)
def test_a_final_answer_is_found_after_any_text_with_closed_blocks(text):
    reply = parse_reply(text + "</think></tool_call></tool_code></answer><answer>red</answer>")
    assert reply.answer == "red"


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(str.isidentifier), st.integers(-99, 99), max_size=4))
def test_json_calls_keep_their_arguments(arguments):
    call = parse_single_call(json.dumps({"name": "crop_video", "arguments": arguments}))
    assert call.arguments == arguments


def test_calls_beyond_a_bound_are_errors():
    calls = parse_reply(CALL * 65).calls
    assert len(calls) == 65
    assert [call.ok for call in calls] == [True] * 64 + [False]
