"""Render docs/api.md: the public names by theme, with signatures, fields and methods, from the source."""

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from pydantic import BaseModel

import saccade
from saccade import testing

THEMES = {
    "Runs": "load_recipe Recipe generate_data make_tiny_model sft rl train evaluate ask Run read_episodes "
    "RolloutRecord",
    "Data": "load_tasks Task Media MediaKind CachingMediaLoader AnswerType Demonstration RecordedResult SourceRow "
    "BenchmarkRow",
    "Episodes and ledger": "Episode EpisodeStatus Turn Reply Block BlockKind Call CallFormat Message ToolResult Usage "
    "Ledger",
    "Environments": "Environment Context Observation Done ToolEnvironment PixelBudget",
    "Tools": "tool ToolContext",
    "Rewards": "Score Credit Span Ungraded ScoredEpisode Group BaseAnswerType",
    "Engines": "Engine ChatEngine GenerationRequest SamplingParams Completion FinishReason WeightSource load_renderer",
    "Training": "TrainingComponents collect build_sample pack MicroBatch train_step Optimizer",
    "Evaluation": "Benchmark Grade estimate_clustered_mean Estimate",
    "Errors": "SaccadeError ConfigError DataError MediaError ModelError EngineError BrokenEngineError ToolError "
    "SandboxError EnvironmentServerError RunError AlarmError",
}
# Types that public names take or return, but that are not public themselves: "module name".
HELD_TYPES = (
    "ledger Segment",
    "ledger Origin",
    "ledger ImageRef",
    "ledger ImageSlot",
    "protocols MediaLoader",
    "protocols VideoInfo",
    "protocols Renderer",
    "protocols RunSubAgent",
    "protocols ScoreFn",
    "protocols EngineRequirements",
    "types UngradedEpisode",
    "types TrainingSample",
    "tools.base FunctionTool",
    "tools.base Range",
    "tools.base EpisodeResources",
    "training.train_step StepReport",
    "evaluation.benchmarks.base GradedAnswer",
    "evaluation.benchmarks.base JudgePrompt",
    "evaluation.runner EvaluationProgress",
)
ALIASES = (
    "runs.api AnyPath",
    "protocols OnStep",
    "ledger Box",
    "protocols EnvironmentFactory",
    "protocols SelectEnvironment",
    "protocols RewardResult",
    "protocols ScoreResult",
    "tools.base Ask",
    "tools.base ToolOutput",
    "training.train_step LossFn",
    "evaluation.benchmarks.base GradeFn",
    "evaluation.benchmarks.base StratumFn",
    "evaluation.benchmarks.base MetricsFn",
)
INTRODUCTION = """# API reference

Every name of `import saccade`, generated from the source. Other modules may change without notice, with these
exceptions: `saccade.testing` ([below](#testing)) checks plugins; `saccade.sandbox` has an API and a README of its own
(`src/saccade/sandbox/README.md`). Two uses need modules without this promise: a model family imports
`saccade.chat.families` ([Extending](extending.md#a-model-family)), and grading the logs of lmms-eval imports
`saccade.interop` and `saccade.evaluation` ([lmms-eval](lmms-eval/README.md#logs)).

Types are frozen dataclasses with keyword arguments unless their signature shows another form. A method's row shows the
call; a property has no parentheses. Tokens are *expanded* tokens except where a row names *unexpanded* ones
([Concepts](concepts.md)).
"""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A field or a method of a type: a row of its table."""

    name: str
    signature: str  # how it is written: `name` of a field, the call of a method
    value_type: str = ""
    default: str = ""
    meaning: str = ""


def render_api(index_comments: Callable[[str], Callable[[int, int], str]], escape: Callable[[str], str]) -> str:
    """Return the page. Raises ValueError for a name without a theme, and for a field or a method without a meaning."""
    listed = " ".join(THEMES.values()).split()
    if sorted(listed) != sorted({*saccade.__all__} - {"__version__"}):
        raise ValueError(f"api_reference.THEMES: correct {sorted({*listed} ^ {*saccade.__all__} - {'__version__'})}")
    parts = [INTRODUCTION, "| theme | names |", "|---|---|"]
    themes = {**THEMES, "Testing": " ".join(testing.__all__)}
    for theme, names in themes.items():
        links = ", ".join(f"[`{name}`](#{name.lower()})" for name in names.split())
        parts.append(f"| [{theme}](#{theme.lower().replace(' ', '-')}) | {links} |")

    def render(name: str, value: Any) -> list[str]:
        return [f"### {name}", "", *render_value(name, value, index_comments, escape)]

    for theme, names in THEMES.items():
        parts += ["", f"## {theme}"]
        for name in names.split():
            parts += ["", *render(name, getattr(saccade, name))]
    parts += [
        "",
        "## Testing",
        "",
        "Import these from `saccade.testing`. A check raises AssertionError with one sentence.",
    ]
    for name in testing.__all__:
        parts += ["", *render(name, getattr(testing, name))]
    parts += [
        "",
        "## Types that these names hold",
        "",
        "They are not in `saccade`: read their fields, don't import them.",
    ]
    for held in HELD_TYPES:
        module, name = held.split()
        parts += ["", *render(name, getattr(importlib.import_module(f"saccade.{module}"), name))]
    parts += ["", "## Type aliases", "", "| alias | definition | meaning |", "|---|---|---|"]
    for alias in ALIASES:
        module, name = alias.split()
        source = inspect.getsource(importlib.import_module(f"saccade.{module}"))
        node = next(
            n for n in ast.parse(source).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name
        )
        meaning = require(f"{module}.{name}", index_comments(source)(node.lineno, node.end_lineno or node.lineno))
        parts.append(f"| `{name}` | {escape(f'`{write(node.value)}`')} | {escape(meaning)} |")
    return "\n".join(parts) + "\n"


def render_value(
    name: str, value: Any, index_comments: Callable[[str], Callable[[int, int], str]], escape: Callable[[str], str]
) -> list[str]:
    """Return the lines of a name: its first sentence, its signature, the rest of its docstring, its members."""
    doc, _, example = (inspect.getdoc(value) or "").partition(">>>")
    sentence, *paragraphs = require(name, doc).strip().split("\n\n")
    lines = [escape(sentence)]
    if signature := get_signature(name, value):
        lines += ["", "```text", signature, "```"]
    for paragraph in paragraphs:
        is_drawing = paragraph.startswith("  ")
        lines += ["", f"```text\n{inspect.cleandoc(paragraph)}\n```" if is_drawing else escape(paragraph)]
    if example:
        lines += ["", "```text", f">>>{example.rstrip()}", "```"]
    if isinstance(value, type) and issubclass(value, enum.Enum):
        members = list_members(value, index_comments)
        lines += ["", "| member | value | meaning |", "|---|---|---|"]
        return lines + [f"| `{m.name}` | `{m.default}` | {escape(m.meaning)} |" for m in members]
    if not isinstance(value, type):
        return lines
    if issubclass(value, saccade.SaccadeError) and value is not saccade.SaccadeError:
        return [*lines, "", "Its signature and fields are those of `SaccadeError`."]
    if issubclass(value, BaseModel):
        lines += ["", "Its fields are the keys of a recipe: [Configuration](configuration.md)."]
    members = list_members(value, index_comments)
    if fields := [member for member in members if member.value_type]:
        lines += ["", "| field | type | default | meaning |", "|---|---|---|---|"]
        for m in fields:
            default = f"`{m.default}`" if m.default else "required" if is_dataclass(value) else ""
            lines.append(f"| `{m.name}` | {escape(f'`{m.value_type}`')} | {escape(default)} | {escape(m.meaning)} |")
    if methods := [member for member in members if not member.value_type]:
        lines += ["", "| method | meaning |", "|---|---|"]
        lines += [f"| {escape(f'`{m.signature}`')} | {escape(m.meaning)} |" for m in methods]
    return lines


def get_signature(name: str, value: Any) -> str:
    """Return the call of a function or a class; nothing for an enumeration, a protocol and an abstract class."""
    if not isinstance(value, type):
        node = parse(inspect.unwrap(value))
        assert isinstance(node, FunctionNode)
        return write_call(node, wrap=True)
    if issubclass(value, enum.Enum | BaseModel) or inspect.isabstract(value) or getattr(value, "_is_protocol", False):
        return ""
    if not is_dataclass(value):
        node = parse(value)
        init = next((n for n in node.body if isinstance(n, FunctionNode) and n.name == "__init__"), None)
        return "" if init is None else write_call(init, name=name, wrap=True, is_method=True)
    positional, keyword = [], []
    for parameter in inspect.signature(value).parameters.values():
        text = parameter.name if parameter.default is parameter.empty else f"{parameter.name}=…"
        (keyword if parameter.kind is parameter.KEYWORD_ONLY else positional).append(text)
    arguments = ", ".join([*positional, *(["*"] if keyword else []), *keyword])
    return "\n".join(textwrap.wrap(f"{name}({arguments})", 100, subsequent_indent=" " * (len(name) + 1)))


def list_members(cls: type, index_comments: Callable[[str], Callable[[int, int], str]]) -> list[Member]:
    """Return the public members of a type and of its bases in Saccade, fields in the order of the constructor."""
    members: dict[str, Member] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("saccade"):
            own = {member.name: member for member in iterate_members(base, index_comments)}
            # What a subclass doesn't describe, its base does.
            members = {name: describe(members.get(name), own.get(name)) for name in {**own, **members}}
    for member in members.values():
        require(f"{cls.__name__}.{member.name}", member.meaning)
    return list(members.values())


def describe(member: Member | None, base: Member | None) -> Member:
    """Return a subclass's member, with its base's meaning where it has none."""
    if member is None or base is None:
        found = member or base
        assert found is not None
        return found
    return member if member.meaning and not member.meaning.startswith("See ") else base


def iterate_members(cls: type, index_comments: Callable[[str], Callable[[int, int], str]]) -> Iterator[Member]:
    """Yield the public members that a class itself defines, with those that its `__init__` sets."""
    find_text = index_comments(get_source(cls))
    is_enum, is_model = issubclass(cls, enum.Enum), issubclass(cls, BaseModel)
    for node in parse(cls).body:
        if isinstance(node, FunctionNode):
            if node.name == "__init__":
                yield from iterate_attributes(node, find_text)
            elif not node.name.startswith("_") or node.name in ("__call__", "__len__"):
                yield read_method(node)
            continue
        if is_model or not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name) or target.id.startswith("_"):
            continue
        default = "" if node.value is None else write_default(node.value)
        if isinstance(node, ast.AnnAssign):
            annotation = re.sub(r"^ClassVar\[(.*)\]$", r"\1", write(node.annotation))
        else:
            annotation = type(ast.literal_eval(default)).__name__
        yield Member(
            name=target.id,
            signature=target.id,
            value_type=annotation,
            default=default.strip("'\"") if is_enum else default,
            meaning=find_text(node.lineno, node.end_lineno or node.lineno),
        )


def iterate_attributes(init: FunctionNode, find_text: Callable[[int, int], str]) -> Iterator[Member]:
    """Yield the public attributes that `__init__` sets."""
    parameters = {argument.arg: argument.annotation for argument in [*init.args.args, *init.args.kwonlyargs]}
    for node in ast.walk(init):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
                annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
                if annotation is None and isinstance(node.value, ast.Name):
                    annotation = parameters.get(node.value.id)
                meaning = find_text(node.lineno, node.end_lineno or node.lineno)
                if annotation is not None and meaning:
                    yield Member(name=target.attr, signature=target.attr, value_type=write(annotation), meaning=meaning)


def read_method(node: FunctionNode) -> Member:
    """Return a method or a property."""
    doc = (ast.get_docstring(node) or "").partition(">>>")[0]
    decorators = {write(decorator) for decorator in node.decorator_list}
    if {"property", "cached_property"} & set(decorators):
        return Member(name=node.name, signature=f"{node.name} -> {write(node.returns)}", meaning=doc)
    signature = write_call(node, is_method="staticmethod" not in decorators)
    return Member(name=node.name, signature=signature, meaning=doc)


def write_call(node: FunctionNode, *, name: str = "", wrap: bool = False, is_method: bool = False) -> str:
    """Return the signature of a function as source, in one line or, with `wrap`, in lines of 100 columns."""
    arguments = node.args
    if is_method:
        arguments = ast.arguments(**{**vars(arguments), "args": arguments.args[1:]})
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    returns = "" if name or node.returns is None else f" -> {write(node.returns)}"
    rows = list_arguments(arguments)
    text = f"{prefix}{name or node.name}({', '.join(rows)}){returns}"
    if not wrap or len(text) <= 100:
        return text
    return "\n".join([f"{prefix}{name or node.name}(", *(f"    {row}," for row in rows), f"){returns}"])


def list_arguments(arguments: ast.arguments) -> list[str]:
    """Return the arguments as source, `/` and `*` included."""
    names = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(names) - len(arguments.defaults)), *arguments.defaults]
    rows = [write_argument(*pair) for pair in zip(names, defaults, strict=True)]
    if arguments.posonlyargs:
        rows.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        rows.append(f"*{write_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        rows.append("*")
    rows += [write_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [*rows, *([f"**{write_argument(arguments.kwarg, None)}"] if arguments.kwarg else [])]


def write_argument(argument: ast.arg, default: ast.expr | None) -> str:
    """Return an argument with its annotation and default."""
    text = argument.arg if argument.annotation is None else f"{argument.arg}: {write(argument.annotation)}"
    return text if default is None else f"{text} = {write(default)}"


def write_default(node: ast.expr) -> str:
    """Return a field's default, or what its factory returns."""
    if isinstance(node, ast.Call) and write(node.func) == "field":
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in keywords:
            return write(keywords["default"])
        factory = write(keywords["default_factory"])
        return {"dict": "{}"}.get(factory, f"{factory}()")
    return write(node)


def write(node: ast.AST | None) -> str:
    """Return a node as source, with quoted annotations unquoted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        return node.value if node.value[:1].isupper() else repr(node.value)
    text = "" if node is None else ast.unparse(node)
    return text.replace("'Episode'", "Episode")


def get_source(value: Any) -> str:
    """Return the source of a class or a function, without its indentation."""
    return textwrap.dedent(inspect.getsource(value))


def parse(value: Any) -> Any:
    """Return the definition of a class or a function."""
    return ast.parse(get_source(value)).body[0]


def require(name: str, meaning: str) -> str:
    """Return the meaning. Raises ValueError if there is none."""
    if not meaning:
        raise ValueError(f"{name}: write a comment behind it, or a docstring, that says what it means")
    return meaning
