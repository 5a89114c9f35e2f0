"""Code blocks: Python in a fence, as a call of the tool `python`."""

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
    ("text", "is_closed"),
    [
        ("<code>\n```python\nx = 1", False),
        ("<code></code>", True),
        ("<code>```python\n\n```</code>", True),
        ("<code>a\ud800</code>", True),
    ],
)
def test_invalid_code_has_an_error(text, is_closed):
    (block,) = parse_reply(text).blocks
    assert (block.is_closed, block.call.ok) == (is_closed, False)


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


@pytest.mark.parametrize("fence", ["```\n", "```"])
def test_many_fences_are_parsed(fence):
    """In linear time: quadratic parsing takes longer than pytest lets a test run."""
    (call,) = parse_reply("<code>" + fence * 200_001 + "</code>").calls
    assert call.name in ("python", "")
