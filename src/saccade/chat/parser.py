"""One turn's text to a reply: blocks in order, calls among them. Pure, and it never raises.

The rules, one by one:

1. A block opens at `<think>`, `<tool_call>`, `<tool_code>`, `<code>` or `<answer>`. It is *closed* if the next tag of
   the same name is its closing tag; then everything in between is its body, other tags included: an answer quoted
   inside a closed think is no answer.
2. Otherwise it is *unclosed* and ends at the next opening tag of any name, or at the end of the text: a think left
   open doesn't swallow the answer or the calls after it, and a call left open doesn't void its siblings.
3. A closing tag outside any block is a STRAY block. Text outside blocks is a TEXT block; white space alone is nothing.
4. A call that can't be read, or isn't closed, is a `Call` with `error` and no arguments.

`<tool_call>` holds `{"name": ..., "arguments": {...}}` in JSON. `<tool_code>` holds one Python call with literal
arguments, bare or in `print(...)`; its positional arguments are kept under "0", "1", ... for the tool to name.
`<code>` holds Python in a fence (several are joined; without one, all of it is the code): a call of the tool `python`.
Duplicate keys, numbers that aren't finite or are beyond 64 bits, nesting beyond 16 levels and text that isn't Unicode
are errors in both forms.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.types import TAGS, Block, BlockKind, Call, Form, Reply

_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_DEPTH = 16
_MAX_CODE = 4096  # characters of a Python call: Python's own parser isn't safe on more
_MAX_INT = 2**63
_MAX_DIGITS = 20  # Python refuses to read integers of some thousand digits, in words meant for programmers


# The body of a call's block to its name and arguments; ValueError (or what JSON's and Python's own parsers raise) says,
# in words for the model, why it can't be read.
Reader = Callable[[str], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The tags that give a reply its structure, with what each holds, and the reader of each tag that holds calls.

    `Grammar(tags={"answer": BlockKind.ANSWER, "look": BlockKind.CALL}, readers={"look": read_look})`; a call is of the
    form that `forms` has for its tag, foreign where it has none.
    """

    tags: Mapping[str, BlockKind]
    readers: Mapping[str, Reader]
    forms: Mapping[str, Form]

    @property
    def tag(self) -> re.Pattern[str]:
        """An opening or closing tag: "/" or nothing, then its name."""
        return re.compile(r"<(/?)(" + "|".join(map(re.escape, self.tags)) + r")>")


def parse(text: str, forced_length: int = 0, grammar: Grammar | None = None) -> Reply:
    """The reply that `text` is; its first `forced_length` characters were forced, not sampled.

    Another `grammar` than Saccade's own reads another system's tags by the same rules.

    >>> reply = parse("<think>Look.</think><answer>red</answer>")
    >>> [block.kind.value for block in reply.blocks], reply.answer
    (['think', 'answer'], 'red')
    >>> parse("<tool_code>print(crop_video(3, end_time=9.5))</tool_code>").calls[0].arguments
    {'0': 3, 'end_time': 9.5}
    """
    grammar = grammar or OWN
    tags = list(grammar.tag.finditer(text))
    partners = _partners(tags)
    openings = _next_openings(tags)
    blocks: list[Block] = []
    index, at = 0, 0
    while index < len(tags):
        # `at` is where the text not yet in a block begins, `index` the first tag at or behind it.
        tag = tags[index]
        _add_text(blocks, text[at : tag.start()])
        if tag[1]:
            blocks.append(Block(kind=BlockKind.STRAY, body=tag[0], closed=False))
            index, at = index + 1, tag.end()
            continue
        partner = partners[index]
        stop = openings[index] if partner is None else partner
        body_end = tags[stop].start() if stop < len(tags) else len(text)
        blocks.append(_block(grammar, tag[2], text[tag.end() : body_end], closed=partner is not None))
        index, at = (stop, body_end) if partner is None else (stop + 1, tags[stop].end())
    _add_text(blocks, text[at:])
    return Reply(text=text, blocks=tuple(blocks), forced=text[: max(forced_length, 0)])


def _partners(tags: Sequence[re.Match[str]]) -> list[int | None]:
    """For each tag, the index of the next tag of its name if that one closes, else None."""
    found: list[int | None] = [None] * len(tags)
    latest: dict[str, int] = {}
    # From the end, so that every tag is looked at once: replies are attacks on quadratic parsers sooner or later.
    for index in range(len(tags) - 1, -1, -1):
        following = latest.get(tags[index][2])
        found[index] = following if following is not None and tags[following][1] else None
        latest[tags[index][2]] = index
    return found


def _next_openings(tags: Sequence[re.Match[str]]) -> list[int]:
    """For each tag, the index of the next opening tag of any name; the number of tags where there is none."""
    found = [len(tags)] * len(tags)
    for index in range(len(tags) - 2, -1, -1):
        found[index] = found[index + 1] if tags[index + 1][1] else index + 1
    return found


def _add_text(blocks: list[Block], text: str) -> None:
    if text.strip():
        blocks.append(Block(kind=BlockKind.TEXT, body=text, closed=True))


def _block(grammar: Grammar, name: str, body: str, *, closed: bool) -> Block:
    kind = grammar.tags[name]
    if kind is not BlockKind.CALL:
        return Block(kind=kind, body=body, closed=closed)
    form = grammar.forms.get(name, Form.FOREIGN)
    call = read_call(grammar.readers[name], body, form) if closed else bad_call("the call is not closed", form)
    return Block(kind=kind, body=body, closed=closed, call=call)


def read_call(reader: Reader, body: str, form: Form) -> Call:
    """The call in a body; whatever can't be read becomes its `error`."""
    try:
        name, arguments = reader(body)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except SyntaxError:
        reason = "it is not valid Python"
    except (RecursionError, MemoryError):  # both parsers' ways to give up
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    else:
        return Call(name=name, arguments=arguments, form=form)
    return bad_call(f"the call can't be read: {reason}", form)


def bad_call(error: str, form: Form) -> Call:
    """A call that can't be run, and why."""
    return Call(name="", arguments={}, form=form, error=error)


# ---- the trained form ----------------------------------------------------------------------------------------------


def json_value(text: str, *, strict: bool = True) -> Any:
    """What a model wrote as JSON; where not `strict`, strings may hold line ends. ValueError says why it is none."""
    return json.loads(text.strip(), object_pairs_hook=_unique, parse_int=_integer, strict=strict)


def _read_json(body: str) -> tuple[str, dict[str, Any]]:
    value = json_value(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
        raise ValueError('it must be {"name": ..., "arguments": {...}}')
    if not isinstance(value.get("arguments"), dict):
        raise ValueError('"arguments" must be an object')
    return _text(value["name"]).strip(), plain(value["arguments"])


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number is not finite or too large")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        raise ValueError("a key is given twice")
    return seen


# ---- the leaked form -----------------------------------------------------------------------------------------------


def _read_python(body: str) -> tuple[str, dict[str, Any]]:
    source = _text(body.strip())
    if len(source) > _MAX_CODE:
        raise ValueError(f"it is longer than {_MAX_CODE} characters")
    # Odd escapes and operators warn while they are parsed; a model's spelling is nobody's warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = _only_call(ast.parse(source, mode="eval").body)
    if isinstance(call.func, ast.Name) and call.func.id == "print" and len(call.args) == 1 and not call.keywords:
        call = _only_call(call.args[0])
    if not isinstance(call.func, ast.Name):
        raise ValueError("it must call a tool by its name")
    pairs = [(str(index), _literal(value)) for index, value in enumerate(call.args)]
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a literal argument")
        pairs.append((keyword.arg, _literal(keyword.value)))
    return _text(call.func.id), plain(_unique(pairs))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:  # their texts hold addresses, which differ from run to run
        raise ValueError("an argument is not a literal") from error


def _only_call(node: ast.expr) -> ast.Call:
    if not isinstance(node, ast.Call):
        raise ValueError("it must be one call, such as crop_video(start_time=3, end_time=9)")
    return node


# ---- code ----------------------------------------------------------------------------------------------------------


def _read_fence(body: str) -> tuple[str, dict[str, Any]]:
    source = "\n".join(_FENCE.findall(body)) or body
    if not source.strip():
        raise ValueError("there is no code in it")
    return "python", {"code": _text(source.strip("\n"))}


# ---- what arguments may be -----------------------------------------------------------------------------------------


def plain(value: Any, *, depth: int = 0) -> Any:
    """The value with tuples as lists, if it is plain JSON within the bounds; else ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, list | tuple):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_text(key): plain(item, depth=depth + 1) for key, item in value.items()}
    raise ValueError(f"a {type(value).__name__} is not a JSON value")


def _number(value: int | float) -> int | float:
    fits = abs(value) < _MAX_INT if isinstance(value, int) else math.isfinite(value)
    if not fits:
        raise ValueError("a number is not finite or too large")
    return value


def _text(value: str) -> str:
    # JSON's \ud800 makes text that no file and no tokenizer can take.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a text is not valid Unicode")
    return value


OWN = Grammar(
    tags=TAGS,
    readers={"tool_call": _read_json, "tool_code": _read_python, "code": _read_fence},
    forms={"tool_call": Form.TRAINED, "tool_code": Form.LEAKED, "code": Form.TRAINED},
)
