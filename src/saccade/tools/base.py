"""A tool is a function: its name, docstring and annotated arguments make the schema the model reads.

    @tool
    async def read_sign(time: Annotated[float, "when, in seconds"], *, ctx: ToolContext) -> str:
        \"\"\"Read the sign that is shown at one moment.\"\"\"

The model's arguments come before the `*`, `ctx` and the tool's settings after it; a recipe sets those by the tool's
name (`tools: {read_sign: {zoom: 2}}`). A number may be written as a text; an argument that the tool doesn't have is
ignored, and the result names it. A mistake of the model becomes an error result that the model reads; failures
that aren't the model's (of the engine, a cancelled episode) are raised.

A tool's timeout covers only its own work: it is paused while the tool waits for a sub-agent, because that time depends
on the engine's load. The episode's deadline bounds that wait.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

from pydantic import AfterValidator, BeforeValidator

from saccade.errors import ConfigError, DataError, MediaError, ModelError, ToolError, convert_errors
from saccade.ledger import ImageRef
from saccade.media.subtitles import Cue
from saccade.plugins import load, resolve, suggest
from saccade.protocols import MediaLoader, Renderer
from saccade.types import Episode, Message, ToolResult
from saccade.utils.async_utils import PausableClock

T = TypeVar("T")
_NUMBER_PATTERN = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?", re.ASCII)
JSON_TYPES: Mapping[type, str] = {float: "number", int: "integer", str: "string", bool: "boolean"}
TRUNCATION_MARK = " [cut]"
OMISSION_MARK = "[…]\n"
_MAX_NAMED = 5  # unknown arguments that a result names

ToolOutput = str | ToolResult | tuple[str | ToolResult, Episode]  # what a tool returns; the episode is a sub-agent's
Ask = Callable[[Sequence[Message]], Awaitable[Episode]]  # runs a sub-agent on messages


def parse_number(text: str) -> float:
    """Parse a number that is written as a text, such as "12.5". Raises ValueError."""
    if not _NUMBER_PATTERN.fullmatch(text.strip()):
        raise ValueError(f"{text!r:.40} is not a number")
    return float(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The inclusive range of a number: `Annotated[float, "seconds", Range(minimum=0)]`."""

    minimum: float = -math.inf  # smallest value
    maximum: float = math.inf  # largest value


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentForm:
    """Further forms in which calls may give an argument: `Annotated[float, "seconds", ArgumentForm(aliases=("t",))]`.

    Published demonstrations, and models trained on them, write the arguments of other schemas.
    """

    aliases: tuple[str, ...] = ()  # other names of the argument
    parse: Callable[[str], float] = parse_number  # converts a text to a number; raises ValueError
    is_listed: bool = True  # whether the schema in the prompt lists the argument


class EpisodeResources(contextlib.AsyncExitStack):
    """Resources that tools keep open for an episode, by name; closed at the end of the block.

    `async with EpisodeResources() as resources: session = await resources.get_or_open("python", open_session)`
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = asyncio.Lock()
        self._resources: dict[str, Any] = {}

    async def get_or_open(self, name: str, open_resource: Callable[[], contextlib.AbstractAsyncContextManager[T]]) -> T:
        """Return the resource `name`, opening it at the first call. Raises what `open_resource` raises."""
        async with self._lock:
            if name not in self._resources:
                self._resources[name] = await self.enter_async_context(open_resource())
            return self._resources[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The context of one tool call."""

    media: MediaLoader  # decodes and caches videos and images
    renderer: Renderer  # of the model
    ask: Ask  # runs a sub-agent on messages and returns its episode
    video_path: str  # the task's first video; "" if it has none
    seed: int  # unique to the call
    task_images: tuple[ImageRef, ...] = ()  # the task's images as the prompt shows them
    shown_images: tuple[ImageRef, ...] = ()  # all images and frames that the model has seen so far, in order
    video_paths: tuple[str, ...] = ()  # all videos of the task
    question: str = ""  # the task's, which may show a name of its video
    subtitles: tuple[Cue, ...] = ()  # of the first video: start and end in seconds, and text
    resources: EpisodeResources | None = None  # what the episode keeps open; None: a tool opens and closes its own
    settings: Mapping[str, Any] = field(default_factory=dict)  # the tool's settings
    max_result_tokens: int = 512  # longest text of a result
    time_factor: float = 1.0  # multiplies the time limits of tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParameter:
    """One argument of the model."""

    name: str
    value_type: type
    description: str
    bounds: Range
    form: ArgumentForm
    required: bool

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema."""
        schema: dict[str, Any] = {"type": JSON_TYPES[self.value_type]}
        if self.description:
            schema["description"] = self.description
        limits = {"minimum": self.bounds.minimum, "maximum": self.bounds.maximum}
        return schema | {name: limit for name, limit in limits.items() if math.isfinite(limit)}

    def check(self, value: Any) -> Any:
        """Return the value, converted. Raises ToolError for the wrong type, NaN, or a number out of range."""
        if isinstance(value, str) and self.value_type in (float, int):
            with contextlib.suppress(ValueError):  # else the type is reported below
                number = self.form.parse(value)
                value = int(number) if number == int(number) else number
        # JSON has one number type: 3 is a valid float, but True (an int in Python) is not.
        if self.value_type is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not self.value_type:
            raise ToolError(f"{self.name} must be of type {JSON_TYPES[self.value_type]}, not {value!r:.40}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ToolError(f"{self.name} must be a finite number, not {value!r:.40}")
        if isinstance(value, int | float) and not self.bounds.minimum <= value <= self.bounds.maximum:
            raise ToolError(f"{self.name} must lie between {self.bounds.minimum:g} and {self.bounds.maximum:g}")
        return value


class FunctionTool:
    """A function as a tool: checks arguments and settings, enforces a timeout, bounds the length of results."""

    def __init__(self, function: Callable[..., Awaitable[ToolOutput]], *, timeout: float) -> None:
        self.name, self.__doc__ = function.__name__, function.__doc__
        self.description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        self.timeout = timeout
        self.__wrapped__ = function
        self._parameters, self._setting_names = _parse_signature(function)
        self.may_run_sub_agent = _may_return_episode(function)
        self._listed = [name for name, parameter in self._parameters.items() if parameter.form.is_listed]
        # names and aliases -> names
        self._names = {
            alias: name for name, parameter in self._parameters.items() for alias in (name, *parameter.form.aliases)
        }
        self.__signature__ = inspect.signature(function, eval_str=True)  # plugins.resolve checks settings against it

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema that goes into the prompt."""
        parameters = {
            "type": "object",
            "properties": {name: self._parameters[name].schema for name in self._listed},
            "required": [parameter.name for parameter in self._parameters.values() if parameter.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, Any], *, ctx: ToolContext) -> tuple[ToolResult, Episode | None]:
        """Run one call; return its result, and the sub-agent's episode if the tool ran one.

        The model's mistakes and unreadable media are error results. Raises EngineError and SandboxError for failures of
        the system, ConfigError for a setting that the tool doesn't have.
        """
        started = time.perf_counter()
        try:
            checked, unknown = self.check(arguments)
            output = await self._run(checked, ctx)
            result, child = output if isinstance(output, tuple) else (output, None)
            if isinstance(result, str):
                result = ToolResult(text=result)
            if result.error is None:  # a tool that returns an error decides whether it ran to its end
                result = replace(result, was_executed=True)
            if unknown:  # the call is run without them, and the model reads that
                result = replace(result, text=f"{self._describe_unknown(unknown)}\n{result.text}".rstrip("\n"))
        except (ToolError, MediaError, DataError, ModelError) as error:
            result, child = ToolResult(error=_hide_paths(str(error), ctx)), None
        return replace(truncate_result(result, ctx), seconds=time.perf_counter() - started), child

    def check(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the arguments by name, each checked, and the names of those that the tool doesn't have.

        Raises ToolError with one sentence for the model.
        """
        checked: dict[str, Any] = {}
        unknown: list[str] = []
        for key, value in self._name_positional(arguments).items():
            name = self._names.get(key)
            if name is None:
                unknown.append(key)
            elif name in checked:
                raise ToolError(f"{self.name} was given {name} twice")
            else:
                checked[name] = self._parameters[name].check(value)
        missing = [name for name, parameter in self._parameters.items() if parameter.required and name not in checked]
        if missing and unknown:
            raise ToolError(f"{self.name} has no argument {unknown[0]!r:.40}; it takes {', '.join(self._listed)}")
        if missing:
            raise ToolError(f"{self.name} needs {' and '.join(missing)}")
        return checked, tuple(unknown)

    def _name_positional(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments with names in place of the positions of a Python-style call, "0", "1", …

        A text in first place that can't be the first argument is the unlisted one, such as a video's path.
        """
        positional = {key: value for key, value in arguments.items() if key.isdecimal() and len(key) < 4}
        if not positional:
            return arguments
        names = self._listed
        unlisted = [name for name, parameter in self._parameters.items() if not parameter.form.is_listed]
        if unlisted and isinstance(value := positional.get("0"), str):
            try:
                self._parameters[names[0]].check(value)
            except ToolError:
                names = [*unlisted, *names]
        named = {key: value for key, value in arguments.items() if key not in positional}
        for key, value in positional.items():
            if int(key) >= len(names):
                raise ToolError(f"{self.name} takes {len(names)} arguments at most: {', '.join(names)}")
            if self._names[names[int(key)]] in {self._names.get(other) for other in named}:
                raise ToolError(f"{self.name} was given {names[int(key)]} twice")
            named[names[int(key)]] = value
        return named

    def _describe_unknown(self, names: Sequence[str]) -> str:
        listing = ", ".join(f"{name!r:.40}" for name in names[:_MAX_NAMED])
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"{self.name} has no argument {listing}{more}: ignored"

    async def _run(self, arguments: Mapping[str, Any], ctx: ToolContext) -> ToolOutput:
        if unknown := set(ctx.settings) - self._setting_names:
            name = min(unknown)
            message = f"the tool {self.name} has no setting {name!r}; {suggest(name, self._setting_names)}"
            raise ConfigError(message, key=f"{self.name}.{name}", value=ctx.settings[name])
        clock, timeout = PausableClock(), self.timeout * ctx.time_factor

        async def ask(messages: Sequence[Message]) -> Episode:
            with clock.pause():
                return await ctx.ask(messages)

        try:
            async with clock.timeout_at(clock.time() + timeout):
                with convert_errors(ToolError, f"{self.name} failed"):
                    return await self.__wrapped__(**arguments, **ctx.settings, ctx=replace(ctx, ask=ask))
        except TimeoutError:
            raise ToolError(f"{self.name} did not finish within {timeout:g} seconds") from None


def _hide_paths(text: str, ctx: ToolContext) -> str:
    """Return the text with names of the task's media in place of their paths: a path can contain the label."""
    names = {image.path: "an image" for image in ctx.shown_images}
    names |= {image.path: f"image {number}" for number, image in enumerate(ctx.task_images)}
    names |= {path: f"video {number}" for number, path in enumerate(ctx.video_paths)}
    names |= {ctx.video_path: "the video"} if ctx.video_path else {}
    for path in sorted(names, key=len, reverse=True):  # one path may be the beginning of another
        text = text.replace(path, names[path])
    return text


@functools.cache
def load_tool(name: str) -> FunctionTool:
    """Load a tool by name, or by the path of its file; cached. Raises ConfigError."""
    plugin = load("tools", name)
    if not isinstance(plugin, FunctionTool):
        message = f"tools/{name} is not a tool; decorate its function with @tool"
        raise ConfigError(message, key="environment.settings.tools", value=name)
    return plugin


def _normalize_tools(tools: Any) -> Any:
    """Convert a list of tool names to tools without settings."""
    if isinstance(tools, list | tuple):
        return {name: {} for name in tools}
    return {name: settings or {} for name, settings in tools.items()} if isinstance(tools, Mapping) else tools


def _resolve_settings(tools: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    for name in tools:
        load_tool(name)
    return {name: resolve("tools", name, settings).keywords for name, settings in tools.items()}


# The type of an environment's `tools` setting; unknown tools and settings are errors before anything runs.
Tools = Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(_normalize_tools), AfterValidator(_resolve_settings)]


@overload
def tool(function: Callable[..., Awaitable[ToolOutput]], /) -> FunctionTool: ...
@overload
def tool(*, timeout: float) -> Callable[[Callable[..., Awaitable[ToolOutput]]], FunctionTool]: ...
def tool(
    function: Callable[..., Awaitable[ToolOutput]] | None = None, /, *, timeout: float = 120.0
) -> FunctionTool | Callable[[Callable[..., Awaitable[ToolOutput]]], FunctionTool]:
    """Turn an async function into a tool with a timeout in seconds: `@tool` or `@tool(timeout=30)`."""
    if function is None:
        return functools.partial(FunctionTool, timeout=timeout)
    return FunctionTool(function, timeout=timeout)


def truncate_result(result: ToolResult, ctx: ToolContext) -> ToolResult:
    """Return a result as the model reads it: the start of a long text, the end of a long error."""
    text = truncate(result.text, ctx.renderer, ctx.max_result_tokens)
    # A traceback ends with the exception's message.
    error = result.error and truncate(result.error, ctx.renderer, ctx.max_result_tokens, keep_end=True)
    return replace(result, text=text, error=error)


def truncate(text: str, renderer: Renderer, max_tokens: int, *, keep_end: bool = False) -> str:
    """Return the text, truncated to at most `max_tokens` tokens including the mark: its start, or its end."""
    if len(text.encode("utf-8", "replace")) <= max_tokens:
        return text  # a token is at least one byte
    ids = renderer.encode(text)
    if len(ids) <= max_tokens:
        return text
    mark = OMISSION_MARK if keep_end else TRUNCATION_MARK
    for num_kept in range(max_tokens - len(renderer.encode(mark)), 0, -1):
        if keep_end:
            truncated = mark + renderer.decode(ids[-num_kept:]).lstrip("\ufffd")
        else:
            truncated = renderer.decode(ids[:num_kept]).rstrip("\ufffd") + mark
        if len(renderer.encode(truncated)) <= max_tokens:
            return truncated  # almost always the first: encoding a part again seldom takes more tokens
    return mark


def _may_return_episode(function: Callable[..., Any]) -> bool:
    """Return whether a tool's return annotation names an episode, that of its sub-agent; without one it may."""
    returned = get_type_hints(function).get("return", Episode)
    return returned is Episode or any(
        option is Episode for part in (returned, *get_args(returned)) for option in get_args(part)
    )


def _parse_signature(function: Callable[..., Any]) -> tuple[dict[str, ToolParameter], frozenset[str]]:
    hints = get_type_hints(function, include_extras=True)
    parameters, settings = {}, set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            settings.add(name)  # set by the recipe, never by the model
            continue
        value_type, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if value_type not in JSON_TYPES:
            message = f"the tool {function.__name__} declares {name} as {value_type}; use float, int, str or bool"
            raise ConfigError(message, key=f"{function.__name__}.{name}", value=value_type)
        parameters[name] = ToolParameter(
            name=name,
            value_type=value_type,
            description=next((note for note in notes if isinstance(note, str)), ""),
            bounds=next((note for note in notes if isinstance(note, Range)), Range()),
            form=next((note for note in notes if isinstance(note, ArgumentForm)), ArgumentForm()),
            required=parameter.default is parameter.empty,
        )
    return parameters, frozenset(settings - {"ctx"})
