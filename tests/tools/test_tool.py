"""The tool decorator: schema, arguments, time, length, and who is to blame."""

import asyncio
import contextlib
import math
from typing import Annotated

import pytest

from saccade.errors import ConfigError, EngineError, MediaError, ToolError
from saccade.testing import PaintedMedia
from saccade.tools._tool import CUT_MARK, Between, ToolContext, cut, tool
from saccade.types import ToolResult


@tool
async def read_sign(
    time: Annotated[float, "when, in seconds", Between(least=0, most=100)],
    lines: Annotated[int, "how many lines", Between(least=1)] = 1,
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


def serve(made, arguments, **changes):
    async def body():
        return (await made(arguments, ctx=changes.pop("ctx", None) or context(**changes)))[0]

    return asyncio.run(body())


def context(renderer=None, **changes):
    given = {"media": PaintedMedia(), "renderer": renderer, "ask": None, "path": "clip.mp4", "seed": 0}
    return ToolContext(**{**given, **changes})


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
    ],
)
def test_arguments_reach_the_function(arguments, text):
    result = serve(read_sign, arguments)
    assert (result.text, result.ok) == (text, True)
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "read_sign needs time"),
        ({"time": "3"}, "time must be of type number, not '3'"),
        ({"time": True}, "time must be of type number, not True"),
        ({"time": None}, "time must be of type number, not None"),
        ({"time": math.nan}, "time must be a finite number, not nan"),
        ({"time": 101}, "time must lie between 0 and 100"),
        ({"time": 10**400}, "time must be of type number"),
        ({"time": 1, "lines": 1.5}, "lines must be of type integer, not 1.5"),
        ({"time": 1, "lines": 0}, "lines must lie between 1 and inf"),
        ({"time": 1, "colour": 1}, "read_sign has no argument 'colour'; it takes time, lines, language, loud"),
        ({"time": 1, "echo": "!"}, "has no argument 'echo'"),
        ({"time": 1, "ctx": 1}, "has no argument 'ctx'"),
        ({"0": 1, "time": 1}, "was given time twice"),
        ({"1" * 5000: 1}, "has no argument '1111"),
        ({"4": 1}, "read_sign takes 4 arguments at most"),
    ],
)
def test_wrong_arguments_are_results(arguments, error):
    result = serve(read_sign, arguments)
    assert error in result.error
    assert not result.executed


def test_settings_come_from_the_context_alone():
    assert serve(read_sign, {"time": 1}, settings={"echo": "!"}).text == "1.0 1 en False!"
    with pytest.raises(ConfigError, match="read_sign has no setting 'ecko'; did you mean 'echo'"):
        serve(read_sign, {"time": 1}, settings={"ecko": "!"})


def failing(error):
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
        (MediaError("clip.mp4 can't be opened"), "clip.mp4 can't be opened"),
    ],
)
def test_failures_are_results(error, sentence):
    result = serve(failing(error), {})
    assert (result.error, result.executed) == (sentence, False)


@pytest.mark.parametrize("error", [EngineError("gone"), ConfigError("wrong"), asyncio.CancelledError()])
def test_what_the_model_cannot_mend_is_raised(error):
    with pytest.raises(type(error)):
        serve(failing(error), {})


def test_a_tools_time_is_bounded():
    ended = []

    @tool(seconds=0.02)
    async def sleeps(*, ctx: ToolContext) -> str:
        """Sleep."""
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(True)
        return ""

    assert serve(sleeps, {}).error == "sleeps did not finish within 0.02 seconds"
    assert ended == [True]


def asking(work, *waits):
    """A tool that has a third of a second, sleeps `work` seconds and asks sub-agents that take `waits`, all at once."""

    @tool(seconds=0.3)
    async def asks(*, ctx: ToolContext) -> str:
        """Ask."""
        await asyncio.sleep(work / 2)
        said = await asyncio.gather(*(ctx.ask((wait,)) for wait in waits))
        await asyncio.sleep(work / 2)
        return " ".join(said)

    async def ask(messages):
        await asyncio.sleep(messages[0])
        return f"after {messages[0]}"

    return serve(asks, {}, ctx=context(ask=ask))


@pytest.mark.slow
def test_waiting_for_sub_agents_is_not_the_tools_time():
    assert asking(0.1, 0.5).text == "after 0.5"
    # While any of them is waited for, whoever ends first and whoever comes later.
    assert asking(0.1, 0.0, 0.6, 0.3).text == "after 0.0 after 0.6 after 0.3"
    assert asking(0.8, 0.0).error == "asks did not finish within 0.3 seconds"
    assert asking(0.8).error == "asks did not finish within 0.3 seconds"


def test_the_tools_time_goes_on_where_it_stood():
    @tool(seconds=0.3)
    async def greedy(*, ctx: ToolContext) -> str:
        """Work a little between many questions."""
        for _ in range(10):
            await asyncio.sleep(0.06)
            await ctx.ask(())
        return ""

    async def ask(messages):
        await asyncio.sleep(0.01)

    assert "within 0.3 seconds" in serve(greedy, {}, ctx=context(ask=ask)).error


def test_a_sub_agent_that_fails_leaves_the_time_as_it_was():
    async def ask(messages):
        raise ToolError("ask for less")

    @tool(seconds=0.1)
    async def insists(*, ctx: ToolContext) -> str:
        """Ask, and go on."""
        with contextlib.suppress(ToolError):
            await ctx.ask(())
        await asyncio.sleep(5)
        return ""

    assert "within 0.1 seconds" in serve(insists, {}, ctx=context(ask=ask)).error


def test_long_texts_are_cut_with_a_mark(renderer):
    @tool
    async def talks(*, ctx: ToolContext) -> ToolResult:
        """Talk."""
        return ToolResult(text="über 12 " * 300, executed=True)

    result = serve(talks, {}, renderer=renderer, result_tokens=40)
    assert result.text.startswith("über 12 über")
    assert result.text.endswith(CUT_MARK)
    assert 30 < len(renderer.encode(result.text)) <= 40


@pytest.mark.parametrize("tokens", [1, 5, 11, 12, 40])
def test_a_cut_never_leaves_half_a_character(renderer, tokens):
    short = cut("日本語🙂" * 50, renderer, tokens)
    assert "\ufffd" not in short
    assert len(renderer.encode(short)) <= max(tokens, len(renderer.encode(CUT_MARK)))


def test_a_text_that_just_fits_is_left_alone(renderer):
    text = "red 12 " * 20
    assert cut(text, renderer, len(renderer.encode(text))) == text
    assert cut(text, renderer, len(renderer.encode(text)) - 1) != text


def test_a_tool_with_arguments_of_odd_types_is_refused():
    with pytest.raises(ConfigError, match="takes where as"):

        @tool
        async def odd(where: list, *, ctx: ToolContext) -> str:
            """Odd."""
            return ""
