"""A tool is a function: its name, docstring and annotated arguments make the schema the model reads.

    @tool
    async def read_sign(time: Annotated[float, "when, in seconds"], *, ctx: ToolContext) -> str:
        \"\"\"Read the sign that is shown at one moment.\"\"\"

Arguments the model may give come before the `*`. After it stand `ctx` and the tool's settings, which a recipe gives by
the tool's name (`tools: {read_sign: {zoom: 2}}`). Whatever the model does wrong comes back as an error result that it
can read; what it can't be blamed for (the engine failed, the episode was cancelled) is raised.

A tool's seconds are those of its own work: while it waits for a sub-agent they don't run, since how busy the engine is
says nothing about the tool. That wait ends with the episode, at its deadline.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

from pydantic import AfterValidator, BeforeValidator

from saccade.errors import ConfigError, DataError, MediaError, ModelError, ToolError, boundary
from saccade.ledger import Picture
from saccade.media.subtitles import Cue
from saccade.plugins import bind, load, nearest
from saccade.protocols import MediaLibrary, Renderer
from saccade.types import Episode, Message, ToolResult

T = TypeVar("T")
JSON_TYPES: Mapping[type, str] = {float: "number", int: "integer", str: "string", bool: "boolean"}
CUT_MARK = " [cut]"

Output = str | ToolResult | tuple[str | ToolResult, Episode]
Ask = Callable[[Sequence[Message]], Awaitable[Episode]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The range of a number, both ends included: `Annotated[float, "seconds", Between(least=0)]`."""

    least: float = -math.inf
    most: float = math.inf


class Shelf:
    """What tools keep open for an episode, by name; all of it is closed when the block ends.

    `async with Shelf() as shelf: box = await shelf.held("python", open_sandbox)`
    """

    def __init__(self) -> None:
        self._stack, self._turn = contextlib.AsyncExitStack(), asyncio.Lock()
        self._held: dict[str, Any] = {}

    async def __aenter__(self) -> "Shelf":
        return self

    async def __aexit__(self, *ending: Any) -> None:
        await self._stack.aclose()

    async def held(self, name: str, opened: Callable[[], contextlib.AbstractAsyncContextManager[T]]) -> T:
        """What stands under `name`, opened by whoever asks first. Raises what opening it raises."""
        async with self._turn:
            if name not in self._held:
                self._held[name] = await self._stack.enter_async_context(opened())
            held: T = self._held[name]
            return held


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool is given for one call: the path of the task's first video ("" where it has none), the task's still
    pictures as the prompt shows them, and `ask`, which runs a sub-agent on messages.

    `videos` are the paths of all videos, `subtitles` the lines of the first one, `pictures` all that the model has been
    shown so far, frames included, in order. What a tool opens for the length of the episode stands on the `shelf`;
    without one, a call is all there is. `settings` are the tool's own, `result_tokens` bounds the text of a result, and
    `seed` is the call's own.
    """

    media: MediaLibrary
    renderer: Renderer
    ask: Ask
    path: str
    seed: int
    images: tuple[Picture, ...] = ()
    pictures: tuple[Picture, ...] = ()
    videos: tuple[str, ...] = ()
    subtitles: tuple[Cue, ...] = ()
    shelf: Shelf | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    result_tokens: int = 512


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
        self.__signature__ = inspect.signature(function, eval_str=True)  # by which a recipe's settings are checked

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
        """Serve one call: what came of it, and the sub-agent's episode where one was asked.

        The model's own mistakes, and media that can't be shown, are results that it can read. Raises EngineError and
        SandboxError where what serves it failed, ConfigError for a setting that the tool doesn't have.
        """
        started = time.perf_counter()
        try:
            output = await self._run(self.check(arguments), ctx)
            result, child = output if isinstance(output, tuple) else (output, None)
            if isinstance(result, str):
                result = ToolResult(text=result, executed=True)
        except (ToolError, MediaError, DataError, ModelError) as error:
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
            if key.isdecimal() and len(key) < 4:  # a leaked call's positional arguments arrive under "0", "1", …
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
        if strange := set(ctx.settings) - self._settings:
            mend = nearest(min(strange), self._settings)
            raise ConfigError(f"the tool {self.name} has no setting {min(strange)!r}; {mend}")
        try:
            async with asyncio.timeout(self.seconds) as limit:
                given = replace(ctx, ask=Patient(ctx.ask, limit))
                with boundary(ToolError, f"{self.name} failed"):
                    return await self._function(**arguments, **ctx.settings, ctx=given)
        except TimeoutError:
            raise ToolError(f"{self.name} did not finish within {self.seconds:g} seconds") from None


@functools.cache
def tool_named(name: str) -> FunctionTool:
    """The tool of that name, or of the file of that path; found once. Raises ConfigError."""
    found = load("tools", name)
    if not isinstance(found, FunctionTool):
        raise ConfigError(f"tools/{name} is no tool; write @tool above its function")
    return found


def _by_name(tools: Any) -> Any:
    """Names in a row are tools with the settings that they have by themselves."""
    if isinstance(tools, list | tuple):
        return {name: {} for name in tools}
    return {name: settings or {} for name, settings in tools.items()} if isinstance(tools, Mapping) else tools


def _settled(tools: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    for name in tools:
        tool_named(name)
    return {name: bind("tools", name, settings).keywords for name, settings in tools.items()}


# In the signature of an agent: the tools it offers, each with its settings. What doesn't exist is refused before
# anything runs.
Tools = Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(_by_name), AfterValidator(_settled)]


class Patient:
    """`ask` under a time limit that stands still while anybody waits for a sub-agent; several may wait at once."""

    def __init__(self, ask: Ask, limit: asyncio.Timeout) -> None:
        self._ask, self._limit = ask, limit
        self._waiting, self._left = 0, 0.0

    async def __call__(self, messages: Sequence[Message]) -> Episode:
        """The sub-agent's episode; see ToolContext."""
        clock = asyncio.get_running_loop().time
        if not self._waiting:
            self._left = (self._limit.when() or 0.0) - clock()
            self._limit.reschedule(None)
        self._waiting += 1
        try:
            return await self._ask(messages)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._limit.reschedule(clock() + self._left)


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
