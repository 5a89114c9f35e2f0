"""Texts from models, datasets and servers are read in linear time: one megabyte of the worst case of each parser.

A quadratic parser takes minutes to hours for such a text, so the timeout alone fails the test.
"""

import base64

import pytest

from saccade import plugins
from saccade.chat.message_renderer import MessageRenderer
from saccade.chat.parser import parse_reply
from saccade.data import conversations
from saccade.data.conversations import SourceMessage, find_bodies
from saccade.data.rewrite_paths import PathRewriter
from saccade.errors import ToolError
from saccade.evaluation.benchmarks.answer_extraction import split_inline_options
from saccade.rewards.answer_types.base import unwrap_answer
from saccade.testing import FakeMediaLoader
from saccade.tools.base import ToolContext
from saccade.tools.video_window import select_video
from saccade.types import BlockKind
from saccade.utils.text import redact

MEGABYTE = 2**20
pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


def fill(unit: str, start: str = "", end: str = "") -> str:
    return start + unit * (MEGABYTE // len(unit)) + end


REPLIES = {
    "fences": fill("```\n", "<code>", "</code>"),
    "fences without line ends": fill("```", "<code>", "</code>"),
    "blanks after a fence": fill(" ", "<code>```", "</code>"),
    "blanks after fences": fill("```" + "\t" * 500, "<code>", "</code>"),
    "unclosed tags": fill("<tool_call>"),
    "malformed JSON calls": fill("<tool_call>{</tool_call>"),
    "malformed Python calls": fill("<tool_code>(</tool_code>"),
    "long Python calls": fill("<tool_code>f(" + "-1," * 1300 + ")</tool_code>"),
    "nested Python calls": fill("<tool_code>f(" + "[" * 90 + "]" * 90 + ")</tool_code>"),
    "a zoom that is a word": fill("a", "<video_zoom>", "</video_zoom>"),
    "a zoom of digits": fill("٣", "<video_zoom>", "</video_zoom>"),
    "a zoom of braces": fill("{", "<video_zoom>", "</video_zoom>"),
    "a zoom of blanks": fill(" ", "<video_zoom>a", "</video_zoom>"),
    "unclosed objects": fill("<json>{"),
    "a nested object": fill('{"a":', "<json>", "</json>"),
}


@pytest.mark.parametrize("text", REPLIES.values(), ids=REPLIES)
def test_replies(text):
    names = [name for name, tag in (("sage", "<json>"), ("video_zoom", "<video_zoom>")) if tag in text[:40]]
    for parse in [plugins.load("chat.tool_formats", name) for name in names] or [parse_reply]:
        reply = parse(text)
        assert reply.text == text
        assert all(block.kind is not BlockKind.CALL or block.call is not None for block in reply.blocks)


KEY = "nsk-proj-aB3+/9_xYz?Q0"
SECRETS = {
    "blanks": fill(" ", KEY[0]),
    "its first character": fill(KEY[0]),
    "its first character and blanks": fill(KEY[0] + " " * 50),
    "its beginnings": fill(KEY[:-1]),
    "backslashes": fill("\\"),
    "escaped line ends": fill("\\n"),
    "escaped beginnings": fill("".join(f"\\u{ord(character):04x}" for character in KEY[:-1])),
    "escapes with zeros": fill("\\u" + "0" * 100),
    "percents": fill("%"),
    "beginnings in percents": fill("".join(f"%{ord(character):02x}" for character in KEY[:-1])),
    "numbers with zeros": fill("&#" + "0" * 100),
    "hex": fill(KEY[:-1].encode().hex()),
    "hex with separators": fill("6" + "0x" * 60),
    "base64": fill(base64.b64encode(KEY[:-1].encode()).decode()),
    "slashes": fill("\\/"),
}


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_redaction(text):
    assert redact(text, KEY) == text


@pytest.mark.parametrize("unit", ["<answer>", "</answer>", "<answer", "\\boxed{", "\\boxed"])
def test_published_answers(unit):
    text = fill(unit)
    assert text.startswith(unwrap_answer(text))
    assert unwrap_answer(f"{text}<answer>red</answer>") == "red"


@pytest.mark.parametrize("unit", [" ", "\t", "<image>", "<image_clue_1>", "<interpreter>", "<tool_response>"])
def test_published_messages(unit):
    text = fill(unit, "a", "b")
    message = SourceMessage.model_validate({"role": "user", "content": text})
    assert message.question.startswith("a")
    assert message.question.endswith("b")
    assert message.parse_result().text
    assert message.role == "user"
    assert find_bodies("tool_response", text) == []


async def refuse_to_ask(*args, **settings):
    raise AssertionError


@pytest.mark.parametrize("unit", ["video path ", "video path:", "video path" + " " * 500])
def test_paths_in_questions(unit):
    ctx = ToolContext(
        media=FakeMediaLoader(),
        renderer=MessageRenderer(32),
        ask=refuse_to_ask,
        video_path="a.mp4",
        seed=0,
        question=fill(unit),
    )
    with pytest.raises(ToolError):
        select_video("b.mp4", ctx=ctx)


@pytest.mark.parametrize("unit", [" ", "\n", "]", ":"])
def test_tool_responses_that_report_an_error(unit):
    message = SourceMessage.model_validate({"role": "user", "content": fill(unit, "[Error:", "!")})
    (result,) = conversations._parse_tool_responses([message], 1)
    assert result.text.startswith("[Error")


@pytest.mark.parametrize("unit", ["\\", "\\u", "\\\\/", "../"])
def test_paths_of_media(unit, tmp_path):
    rewriter = PathRewriter(str(tmp_path))
    path = fill(unit, "selfqa/", "x")
    assert rewriter.rewrite_value(path).endswith(path)


@pytest.mark.parametrize("unit", [" ", "\t", "\n", "(B)", "(B) ", "(B) b\n"])
def test_options_in_a_question(unit):
    question, options = split_inline_options(fill(unit, "Which?\n(A) a", "x\n(B) b  "))
    assert question == "Which?"
    assert len(options) >= 2
