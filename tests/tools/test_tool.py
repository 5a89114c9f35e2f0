"""The tool decorator: schema, arguments, timeout, length of results, and which failures are raised."""

import asyncio
import contextlib
import math
from typing import Annotated

import pytest
from error_cases import raises
from virtual_time import run_in_virtual_time

from saccade.errors import ConfigError, EngineError, MediaError, ToolError
from saccade.testing import FakeMediaLoader
from saccade.tools.base import TRUNCATION_MARK, Range, ToolContext, tool, truncate
from saccade.types import Episode, ToolResult


@tool
async def read_sign(
    time: Annotated[float, "when, in seconds", Range(minimum=0, maximum=100)],
    lines: Annotated[int, "how many lines", Range(minimum=1)] = 1,
    language: Annotated[str, "of the sign"] = "en",
    loud: Annotated[bool, "in capitals"] = False,
    *,
    ctx: ToolContext,
    echo: str = "",
) -> str:
    """Read the sign that is shown
    at one moment.

    Not for the model.
    """
    return f"{time} {lines} {language} {loud}{echo}"


def call_tool(function_tool, arguments, run=asyncio.run, **changes):
    async def body():
        return (await function_tool(arguments, ctx=changes.pop("ctx", None) or make_context(**changes)))[0]

    return run(body())


def make_context(renderer=None, **changes):
    fields = {"media": FakeMediaLoader(), "renderer": renderer, "ask": None, "video_path": "clip.mp4", "seed": 0}
    return ToolContext(**{**fields, **changes})


def test_an_episode_in_the_return_annotation_is_a_sub_agents():
    @tool
    async def asks(*, ctx: ToolContext) -> ToolResult | tuple[ToolResult, Episode]:
        """Ask a sub-agent."""

    @tool
    async def unknown(*, ctx: ToolContext):
        """Return anything."""

    assert asks.may_run_sub_agent
    assert unknown.may_run_sub_agent
    assert not read_sign.may_run_sub_agent


def test_the_schema_is_the_signature():
    function = read_sign.schema["function"]
    assert read_sign.schema["type"] == "function"
    assert (function["name"], function["description"]) == ("read_sign", "Read the sign that is shown at one moment.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "time": {"type": "number", "description": "when, in seconds", "minimum": 0, "maximum": 100},
            "lines": {"type": "integer", "description": "how many lines", "minimum": 1},
            "language": {"type": "string", "description": "of the sign"},
            "loud": {"type": "boolean", "description": "in capitals"},
        },
        "required": ["time"],
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"time": 3}, "3.0 1 en False"),
        ({"0": 3.5, "1": 2, "loud": True}, "3.5 2 en True"),
        ({"1": 2, "time": 0}, "0.0 2 en False"),
        ({"time": "3"}, "3.0 1 en False"),
        ({"time": " 3.25 ", "lines": "2"}, "3.25 2 en False"),
    ],
)
def test_arguments_reach_the_function(arguments, text):
    result = call_tool(read_sign, arguments)
    assert (result.text, result.ok) == (text, True)
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({}, ("read_sign", "time")),
        ({"time": "3 s"}, ("time", "number", "'3 s'")),
        ({"time": "nan"}, ("time", "number", "'nan'")),
        ({"time": "1_0"}, ("time", "number", "'1_0'")),
        ({"time": 1, "lines": "1.5"}, ("lines", "integer", "1.5")),
        ({"time": True}, ("time", "number", "True")),
        ({"time": None}, ("time", "number", "None")),
        ({"time": math.nan}, ("time", "nan")),
        ({"time": 101}, ("time", "0", "100")),
        ({"time": 10**400}, ("time", "number")),
        ({"time": 1, "lines": 1.5}, ("lines", "integer", "1.5")),
        ({"time": 1, "lines": 0}, ("lines", "1", "inf")),
        ({"tome": 1}, ("read_sign", "'tome'", "time, lines, language, loud")),
        ({"0": 1, "time": 1}, ("time",)),
        ({"1" * 5000: 1}, ("'1111",)),
        ({"4": 1}, ("read_sign", "4")),
    ],
)
def test_wrong_arguments_are_error_results(arguments, values):
    result = call_tool(read_sign, arguments)
    assert all(value in result.error for value in values)
    assert not result.was_executed


def test_arguments_that_the_tool_lacks_are_named_in_the_result():
    result = call_tool(read_sign, {"time": 1, "color": 1, "echo": "!", "ctx": None})
    first, text = result.text.split("\n")
    assert (text, result.ok) == ("1.0 1 en False", True)
    assert all(name in first for name in ("'color'", "'echo'", "'ctx'"))
    many = call_tool(read_sign, {"time": 1, **{f"extra_{index}": index for index in range(100)}})
    assert "'extra_4' and 95 more" in many.text
    assert many.ok


def test_settings_come_from_the_context_alone():
    assert call_tool(read_sign, {"time": 1}, settings={"echo": "!"}).text == "1.0 1 en False!"
    with raises(ConfigError, key="read_sign.ecko", value="!"):
        call_tool(read_sign, {"time": 1}, settings={"ecko": "!"})


def make_failing_tool(error):
    @tool
    async def fails(*, ctx: ToolContext) -> str:
        """Fail."""
        raise error

    return fails


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("no such line"), "fails failed: no such line"),
        (KeyError(), "fails failed: KeyError"),
        (TimeoutError(), "fails failed: TimeoutError"),
        (MediaError("clip.mp4 can't be opened"), "the video can't be opened"),
    ],
)
def test_failures_are_error_results(error, sentence):
    result = call_tool(make_failing_tool(error), {})
    assert (result.error, result.was_executed) == (sentence, False)


@pytest.mark.parametrize("error", [EngineError("gone"), ConfigError("wrong"), asyncio.CancelledError()])
def test_failures_that_are_not_the_models_are_raised(error):
    with pytest.raises(type(error)):
        call_tool(make_failing_tool(error), {})


def test_tools_time_out():
    ended = []

    @tool(timeout=0.02)
    async def sleeps(*, ctx: ToolContext) -> str:
        """Sleep."""
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)
        return ""

    assert "0.02" in call_tool(sleeps, {}, run_in_virtual_time).error
    assert ended == [True]


def run_asking_tool(work, *waits):
    """Run a tool with a timeout of 0.3 s that sleeps `work` seconds and runs sub-agents of `waits` seconds at once."""

    @tool(timeout=0.3)
    async def query(*, ctx: ToolContext) -> str:
        """Ask."""
        await asyncio.sleep(work / 2)
        answers = await asyncio.gather(*(ctx.ask((wait,)) for wait in waits))
        await asyncio.sleep(work / 2)
        return " ".join(answers)

    async def ask(messages):
        await asyncio.sleep(messages[0])
        return f"after {messages[0]}"

    return call_tool(query, {}, run_in_virtual_time, ctx=make_context(ask=ask))


def test_waiting_for_sub_agents_pauses_the_timeout():
    assert run_asking_tool(0.1, 0.5).text == "after 0.5"
    # The timeout is paused until the last of several sub-agents has finished.
    assert run_asking_tool(0.1, 0.0, 0.6, 0.3).text == "after 0.0 after 0.6 after 0.3"
    assert "0.3" in run_asking_tool(0.8, 0.0).error
    assert "0.3" in run_asking_tool(0.8).error


def test_the_timeout_resumes_where_it_was_paused():
    @tool(timeout=0.3)
    async def greedy(*, ctx: ToolContext) -> str:
        """Work a little between many questions."""
        for _ in range(10):
            await asyncio.sleep(0.06)
            await ctx.ask(())
        return ""

    async def ask(messages):
        await asyncio.sleep(0.01)

    assert "0.3" in call_tool(greedy, {}, run_in_virtual_time, ctx=make_context(ask=ask)).error


def test_the_timeout_resumes_after_a_failed_sub_agent():
    async def ask(messages):
        raise ToolError("ask for less")

    @tool(timeout=0.1)
    async def insists(*, ctx: ToolContext) -> str:
        """Ask, and continue."""
        with contextlib.suppress(ToolError):
            await ctx.ask(())
        await asyncio.sleep(5)
        return ""

    assert "0.1" in call_tool(insists, {}, run_in_virtual_time, ctx=make_context(ask=ask)).error


@pytest.mark.parametrize(
    ("returned", "was_executed"),
    [
        (ToolResult(text="red"), True),
        (ToolResult(), True),
        (ToolResult(error="no signal"), False),
        (ToolResult(error="it raised", was_executed=True), True),
    ],
)
def test_a_result_without_an_error_counts_as_executed(returned, was_executed):
    @tool
    async def look(*, ctx: ToolContext) -> ToolResult:
        """Look."""
        return returned

    assert call_tool(look, {}).was_executed == was_executed


def test_long_texts_are_truncated_with_a_mark(renderer):
    @tool
    async def long_text(*, ctx: ToolContext) -> ToolResult:
        """Return a long text."""
        return ToolResult(text="über 12 " * 300)

    result = call_tool(long_text, {}, renderer=renderer, max_result_tokens=40)
    assert result.text.startswith("über 12 über")
    assert result.text.endswith(TRUNCATION_MARK)
    assert 30 < len(renderer.encode(result.text)) <= 40


@pytest.mark.parametrize("max_tokens", [1, 5, 11, 12, 40])
def test_truncation_keeps_whole_characters(renderer, max_tokens):
    truncated = truncate("日本語🙂" * 50, renderer, max_tokens)
    assert "\ufffd" not in truncated
    assert len(renderer.encode(truncated)) <= max(max_tokens, len(renderer.encode(TRUNCATION_MARK)))


def test_a_text_that_fits_is_unchanged(renderer):
    text = "red 12 " * 20
    assert truncate(text, renderer, len(renderer.encode(text))) == text
    assert truncate(text, renderer, len(renderer.encode(text)) - 1) != text


def test_unsupported_argument_types_are_refused():
    with raises(ConfigError, key="odd.where", value=list):

        @tool
        async def odd(where: list, *, ctx: ToolContext) -> str:
            """Odd."""
            return ""
