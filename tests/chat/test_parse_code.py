"""Code blocks: Python in a fence, as a call of the tool `python`."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.chat.parse import parse
from saccade.types import BlockKind, Form


def code_of(text):
    (call,) = parse(text).calls
    assert (call.name, call.form, call.error) == ("python", Form.TRAINED, None)
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
def test_a_block_is_a_call(body, code):
    reply = parse(f"<think>Look.</think><code>{body}</code>")
    assert [block.kind for block in reply.blocks] == [BlockKind.THINK, BlockKind.CALL]
    assert reply.answer is None
    assert code_of(reply.text) == code


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<code>\n```python\nx = 1", "the call is not closed"),
        ("<code></code>", "the call can't be read: there is no code in it"),
        ("<code>```python\n\n```</code>", "the call can't be read: there is no code in it"),
        ("<code>a\ud800</code>", "the call can't be read: a text is not valid Unicode"),
    ],
)
def test_what_is_no_code_is_an_error_to_read(text, error):
    assert parse(text).calls[0].error == error


def test_several_blocks_keep_their_order():
    reply = parse("<code>```\na\n```</code> and <code>```\nb\n```</code>")
    assert [call.arguments["code"] for call in reply.calls] == ["a", "b"]


def test_an_answer_after_code_is_an_answer():
    reply = parse("<code>a</code><answer>\\boxed{B}</answer>")
    assert (reply.answer, len(reply.calls)) == ("\\boxed{B}", 1)


@given(st.lists(st.sampled_from(["<code>", "</code>", "```", "```python\n", "\n", "x = 1", "<answer>"]), max_size=12))
def test_nothing_is_ever_raised(pieces):
    for call in parse("".join(pieces)).calls:
        assert call.error is not None or call.arguments["code"].strip()


def test_many_fences_are_read_in_a_moment():
    begun = time.monotonic()
    parse("<code>" + "```\n" * 50_001 + "</code>")
    parse("<code>" + "```" * 50_001 + "</code>")
    assert time.monotonic() - begun < 5
