"""Code blocks: Python in a fence, as a call of the tool `python`."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.chat.parser import parse_reply
from saccade.types import BlockKind, CallFormat


def get_code(text):
    (call,) = parse_reply(text).calls
    assert (call.name, call.call_format, call.error) == ("python", CallFormat.NATIVE, None)
    return call.arguments["code"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("\n```python\nprint(1)\n```\n", "print(1)"),
        ("```python\nif 1:\n    x = 2\n\n    y = 3\n```", "if 1:\n    x = 2\n\n    y = 3"),
        ("```py\na\n```", "a"),
        ("```Python3 \na\n```", "a"),
        ("```\na\n```", "a"),
        ("print(1)", "print(1)"),
        ("\n    print(1)\n", "    print(1)"),
        ("I crop.\n```python\na\n```\nthen\n```python\nb\n```", "a\n\nb"),
        ("```python\nnever closed", "never closed"),
        ("```python\nprint('<think></think><answer>B</answer><tool_call>')\n```",
         "print('<think></think><answer>B</answer><tool_call>')"),
    ],
)  # fmt: skip
def test_a_code_block_is_a_call_of_python(body, code):
    reply = parse_reply(f"<think>Look.</think><code>{body}</code>")
    assert [block.kind for block in reply.blocks] == [BlockKind.THINK, BlockKind.CALL]
    assert reply.answer is None
    assert get_code(reply.text) == code


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<code>\n```python\nx = 1", "the call is not closed"),
        ("<code></code>", "the call can't be read: there is no code in it"),
        ("<code>```python\n\n```</code>", "the call can't be read: there is no code in it"),
        ("<code>a\ud800</code>", "the call can't be read: a text is not valid Unicode"),
    ],
)
def test_invalid_code_has_an_error(text, error):
    assert parse_reply(text).calls[0].error == error


def test_several_blocks_keep_their_order():
    reply = parse_reply("<code>```\na\n```</code> and <code>```\nb\n```</code>")
    assert [call.arguments["code"] for call in reply.calls] == ["a", "b"]


def test_an_answer_after_code_is_found():
    reply = parse_reply("<code>a</code><answer>\\boxed{B}</answer>")
    assert (reply.answer, len(reply.calls)) == ("\\boxed{B}", 1)


@given(st.lists(st.sampled_from(["<code>", "</code>", "```", "```python\n", "\n", "x = 1", "<answer>"]), max_size=12))
def test_parsing_never_raises(pieces):
    for call in parse_reply("".join(pieces)).calls:
        assert call.error is not None or call.arguments["code"].strip()


def test_many_fences_are_parsed_in_seconds():
    start_time = time.process_time()  # of this process, whatever else the machine does
    parse_reply("<code>" + "```\n" * 50_001 + "</code>")
    parse_reply("<code>" + "```" * 50_001 + "</code>")
    assert time.process_time() - start_time < 30  # quadratic parsing takes many minutes
