"""A tool is a function: its name, docstring and annotated arguments make the schema the model reads.

    @tool
    async def read_sign(time: Annotated[float, "when, in seconds"], *, ctx: ToolContext) -> str:
        \"\"\"Read the sign that is shown at one moment.\"\"\"

Arguments the model may give come before the `*`. After it stand `ctx` and the tool's settings; a setting is filled from
`ctx.settings` where that names it. Whatever the model does wrong comes back as an error result that it can read; what
it can't be blamed for (the engine failed, the episode was cancelled) is raised.
"""

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints, overload

from saccade.errors import ConfigError, MediaError, ToolError, boundary
from saccade.ledger import Picture
from saccade.media.picks import stamp
from saccade.protocols import MediaLibrary, Renderer
from saccade.types import Episode, Message, ToolResult

JSON_TYPES: Mapping[type, str] = {float: "number", int: "integer", str: "string", bool: "boolean"}
CUT_MARK = " [cut]"

Output = str | ToolResult | tuple[str | ToolResult, Episode]
Ask = Callable[[Sequence[Message]], Awaitable[Episode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The range of a number, both ends included: `Annotated[float, "seconds", Between(least=0)]`."""

    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool is given for one call: the file it is about, and `ask`, which runs a sub-agent on messages.

    `settings` are the agent's for its tools, `result_tokens` bounds the text of a result, `deadline` is in seconds of
    the event loop's clock, and `seed` is the call's own.
    """

    media: MediaLibrary
    renderer: Renderer
    ask: Ask
    path: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    result_tokens: int = 512
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument the model may give."""

    name: str
    type: type
    about: str
    between: Between
    required: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": JSON_TYPES[self.type]}
        if self.about:
            schema["description"] = self.about
        limits = {"minimum": self.between.least, "maximum": self.between.most}
        return schema | {name: limit for name, limit in limits.items() if math.isfinite(limit)}

    def check(self, value: Any) -> Any:
        """The value as the tool takes it. Raises ToolError for another type, NaN, or a number out of range."""
        # JSON has one kind of number: 3 is a fine float, but True (an int to Python) is not.
        if self.type is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not self.type:
            raise ToolError(f"{self.name} must be of type {JSON_TYPES[self.type]}, not {_short(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ToolError(f"{self.name} must be a finite number, not {_short(value)}")
        if isinstance(value, int | float) and not self.between.least <= value <= self.between.most:
            raise ToolError(f"{self.name} must lie between {self.between.least:g} and {self.between.most:g}")
        return value


class FunctionTool:
    """A function as the model's tool: checked, timed, bounded in length, and silent about nothing."""

    def __init__(self, function: Callable[..., Awaitable[Output]], *, seconds: float) -> None:
        self.name = function.__name__
        self.description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        self.seconds = seconds
        self._function = function
        self._arguments, self._settings = _arguments(function)

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema that goes into the prompt."""
        parameters = {
            "type": "object",
            "properties": {argument.name: argument.schema for argument in self._arguments.values()},
            "required": [argument.name for argument in self._arguments.values() if argument.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, Any], *, ctx: ToolContext) -> tuple[ToolResult, Episode | None]:
        """Serve one call; see protocols.Tool. Raises EngineError only; the model's own mistakes are results."""
        started = time.perf_counter()
        try:
            output = await self._run(self.check(arguments), ctx)
            result, child = output if isinstance(output, tuple) else (output, None)
            if isinstance(result, str):
                result = ToolResult(text=result, executed=True)
        except (ToolError, MediaError) as error:
            result, child = ToolResult(error=str(error)), None
        seconds = time.perf_counter() - started
        return replace(
            result,
            text=cut(result.text, ctx.renderer, ctx.result_tokens),
            error=None if result.error is None else cut(result.error, ctx.renderer, ctx.result_tokens),
            seconds=seconds,
        ), child

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, each checked. Raises ToolError with one sentence for the model."""
        known = ", ".join(self._arguments)
        names, checked = list(self._arguments), {}
        for key, value in arguments.items():
            name = key
            if key.isdecimal():  # a leaked call's positional arguments arrive under "0", "1", …
                if int(key) >= len(names):
                    raise ToolError(f"{self.name} takes {len(names)} arguments at most: {known}")
                name = names[int(key)]
            if name not in self._arguments:
                raise ToolError(f"{self.name} has no argument {_short(name)}; it takes {known}")
            if name in checked:
                raise ToolError(f"{self.name} was given {name} twice")
            checked[name] = self._arguments[name].check(value)
        missing = [name for name, argument in self._arguments.items() if argument.required and name not in checked]
        if missing:
            raise ToolError(f"{self.name} needs {' and '.join(missing)}")
        return checked

    async def _run(self, arguments: Mapping[str, Any], ctx: ToolContext) -> Output:
        settings = {name: value for name, value in ctx.settings.items() if name in self._settings}
        limit = asyncio.get_running_loop().time() + self.seconds
        # Whichever comes first; the sentence says which, since the model can only do something about its own.
        late = ctx.deadline is not None and ctx.deadline < limit
        try:
            async with asyncio.timeout_at(ctx.deadline if late else limit):
                with boundary(ToolError, f"{self.name} failed"):
                    return await self._function(**arguments, **settings, ctx=ctx)
        except TimeoutError:
            when = "before the episode's deadline" if late else f"within {self.seconds:g} seconds"
            raise ToolError(f"{self.name} did not finish {when}") from None


@overload
def tool(function: Callable[..., Awaitable[Output]], /) -> FunctionTool: ...
@overload
def tool(*, seconds: float) -> Callable[[Callable[..., Awaitable[Output]]], FunctionTool]: ...
def tool(
    function: Callable[..., Awaitable[Output]] | None = None, /, *, seconds: float = 120.0
) -> FunctionTool | Callable[[Callable[..., Awaitable[Output]]], FunctionTool]:
    """Make an async function a tool that may run for `seconds`: `@tool` or `@tool(seconds=30)`."""
    if function is None:
        return functools.partial(FunctionTool, seconds=seconds)
    return FunctionTool(function, seconds=seconds)


def cut(text: str, renderer: Renderer, tokens: int) -> str:
    """The text if it has at most `tokens` tokens, else as much of it as fits together with a mark."""
    if len(text.encode()) <= tokens:
        return text  # a token is at least one byte
    ids = renderer.encode(text)
    if len(ids) <= tokens:
        return text
    for keep in range(tokens - len(renderer.encode(CUT_MARK)), 0, -1):
        shorter = renderer.decode(ids[:keep]).rstrip("\ufffd") + CUT_MARK
        if len(renderer.encode(shorter)) <= tokens:
            return shorter  # almost always the first: a prefix seldom takes more tokens when encoded again
    return CUT_MARK


def timed(pictures: Sequence[Picture]) -> list[str | Picture]:
    """Message parts that show frames, each preceded by its time: `<12.5 seconds>`."""
    return [part for picture in pictures for part in (stamp(picture.time or 0.0), picture)]


def _arguments(function: Callable[..., Any]) -> tuple[dict[str, Argument], frozenset[str]]:
    hints = get_type_hints(function, include_extras=True)
    arguments, settings = {}, set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings.add(name)  # the recipe's, never the model's
            continue
        kind, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if kind not in JSON_TYPES:
            raise ConfigError(f"the tool {function.__name__} takes {name} as {kind}; use float, int, str or bool")
        about = next((note for note in notes if isinstance(note, str)), "")
        between = next((note for note in notes if isinstance(note, Between)), Between())
        required = parameter.default is parameter.empty
        arguments[name] = Argument(name=name, type=kind, about=about, between=between, required=required)
    return arguments, frozenset(settings - {"ctx"})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
