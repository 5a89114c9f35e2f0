"""Parse one turn's text into a reply: blocks in order, with the tool calls. Pure; never raises.

The rules:

1. A block opens at `<think>`, `<tool_call>`, `<tool_code>`, `<code>` or `<answer>`. It is *closed* if the next tag of
   the same name is its closing tag; then its body is all text in between, other tags included: an answer quoted in a
   closed think is not an answer.
2. Otherwise it is *unclosed* and ends at the next opening tag of any name, or at the end of the text: an
   unclosed think doesn't hide the answer or the calls after it, and an unclosed call doesn't invalidate other calls.
3. A closing tag outside any block is an UNMATCHED_TAG block. Text outside blocks is a TEXT block, unless blank.
4. A call that can't be parsed, or isn't closed, is a `Call` with `error` and no arguments.

`<tool_call>` holds `{"name": ..., "arguments": {...}}` in JSON. `<tool_code>` holds one Python call with literal
arguments, bare or in `print(...)`; its positional arguments have the keys "0", "1", ..., which the tool maps to names.
`<code>` holds Python in a fence (several are joined; without one, the whole body is code): a call of the tool `python`.
Calls after the 64th, duplicate keys, numbers that aren't finite or exceed 64 bits, nesting beyond 16 levels and
invalid Unicode are errors in all formats.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.types import TAG_KINDS, Block, BlockKind, Call, CallFormat, Reply
from saccade.utils.python_source import parse_python

# Possessive: `[ \t]*` twice would divide a long run of blanks in every way before it fails.
_FENCE_PATTERN = re.compile(r"```[ \t]*+(?:python3?|py)?+[ \t]*+\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_MAX_DEPTH = 16
_MAX_CALLS = 64  # calls of a reply that are parsed: a degenerate reply may hold tens of thousands
_MAX_CODE_CHARS = 4096  # characters of a Python call: Python's own parser isn't safe on more
_MAX_INT = 2**63
_MAX_DIGITS = 20  # Python rejects integers of some thousand digits, with a message meant for programmers


# Parses the body of a call's block into name and arguments. Raises ValueError, or what the JSON and Python parsers
# raise; the model reads the text of a ValueError.
CallParser = Callable[[str], tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """The structural tags of a reply with their block kinds, and the parser and format of each tag that holds calls.

    The format of a tag missing in `call_formats` is THIRD_PARTY.
    """

    tags: Mapping[str, BlockKind]
    call_parsers: Mapping[str, CallParser]
    call_formats: Mapping[str, CallFormat]


def parse_reply(text: str, prefill_length: int = 0, grammar: Grammar | None = None) -> Reply:
    """Parse `text` into a reply; its first `prefill_length` characters were prefilled, not sampled.

    A `grammar` other than the default parses another system's tags by the same rules.

    >>> reply = parse_reply("<think>Look.</think><answer>red</answer>")
    >>> [block.kind.value for block in reply.blocks], reply.answer
    (['think', 'answer'], 'red')
    >>> parse_reply("<tool_code>print(crop_video(3, end_time=9.5))</tool_code>").calls[0].arguments
    {'0': 3, 'end_time': 9.5}
    """
    grammar = grammar or DEFAULT_GRAMMAR
    # The groups of a tag are "/" or "", and the name.
    tags = list(re.finditer(f"<(/?)({'|'.join(map(re.escape, grammar.tags))})>", text))
    links = _link_tags(tags)
    blocks: list[Block] = []
    index, position, num_calls = 0, 0, 0
    while index < len(tags):
        # `position` is the start of the text that is in no block yet, `index` the first tag at or after it.
        tag = tags[index]
        _append_text(blocks, text[position : tag.start()])
        if tag[1]:
            blocks.append(Block(kind=BlockKind.UNMATCHED_TAG, body=tag[0], is_closed=False))
            index, position = index + 1, tag.end()
            continue
        partner, next_opening = links[index]
        stop = next_opening if partner is None else partner
        body_end = tags[stop].start() if stop < len(tags) else len(text)
        blocks.append(_build_block(grammar, tag[2], text[tag.end() : body_end], partner is not None, num_calls))
        num_calls += blocks[-1].call is not None
        index, position = (stop, body_end) if partner is None else (stop + 1, tags[stop].end())
    _append_text(blocks, text[position:])
    return Reply(text=text, blocks=tuple(blocks), prefill=text[: max(prefill_length, 0)])


def _link_tags(tags: Sequence[re.Match[str]]) -> list[tuple[int | None, int]]:
    """Return, for each tag, two indices: its closing tag if that is the next tag of its name, and the next opening tag.

    They are None and len(tags) if there is none.
    """
    links: list[tuple[int | None, int]] = []
    latest: dict[str, int] = {}
    next_opening = len(tags)
    # From the end, to visit each tag once: a long degenerate reply would make a quadratic parser hang.
    for index, tag in reversed([*enumerate(tags)]):
        following = latest.get(tag[2])
        links.append((following if following is not None and tags[following][1] else None, next_opening))
        latest[tag[2]] = index
        next_opening = next_opening if tag[1] else index
    return links[::-1]


def _append_text(blocks: list[Block], text: str) -> None:
    if text.strip():
        blocks.append(Block(kind=BlockKind.TEXT, body=text, is_closed=True))


def _build_block(grammar: Grammar, name: str, body: str, is_closed: bool, num_calls: int) -> Block:
    """Build the block of a tag; `num_calls` calls precede it in the reply."""
    kind = grammar.tags[name]
    if kind is not BlockKind.CALL:
        return Block(kind=kind, body=body, is_closed=is_closed)
    call_format = grammar.call_formats.get(name, CallFormat.THIRD_PARTY)
    if num_calls >= _MAX_CALLS:
        call = build_invalid_call(f"a reply may have at most {_MAX_CALLS} calls", call_format)
    elif is_closed:
        call = _parse_call(grammar.call_parsers[name], body, call_format)
    else:
        call = build_invalid_call("the call is not closed", call_format)
    return Block(kind=kind, body=body, is_closed=is_closed, call=call)


def _parse_call(parser: CallParser, body: str, call_format: CallFormat) -> Call:
    try:
        name, arguments = parser(body)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except SyntaxError:
        reason = "it is not valid Python"
    except (RecursionError, MemoryError):  # raised by both parsers at their nesting limit
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error)
    else:
        return Call(name=name, arguments=arguments, call_format=call_format)
    return build_invalid_call(f"the call can't be read: {reason}", call_format)


def build_invalid_call(error: str, call_format: CallFormat) -> Call:
    """Return a call that can't be executed, with the reason."""
    return Call(name="", arguments={}, call_format=call_format, error=error)


def parse_json(text: str, *, strict: bool = True) -> Any:
    """Parse JSON written by a model; unless `strict`, strings may contain line ends. Raises ValueError."""
    return json.loads(text.strip(), object_pairs_hook=_reject_duplicate_keys, parse_int=_parse_int, strict=strict)


def _parse_json_call(body: str) -> tuple[str, dict[str, Any]]:
    value = parse_json(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"].strip():
        raise ValueError('it must be {"name": ..., "arguments": {...}}')
    if not isinstance(value.get("arguments"), dict):
        raise ValueError('"arguments" must be an object')
    return _check_unicode(value["name"]).strip(), normalize_json(value["arguments"])


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number is not finite or too large")
    return int(digits)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key is given twice")
    return unique


def _parse_python_call(body: str) -> tuple[str, dict[str, Any]]:
    source = _check_unicode(body.strip())
    if len(source) > _MAX_CODE_CHARS:
        raise ValueError(f"it is longer than {_MAX_CODE_CHARS} characters")
    call = _require_single_call(parse_python(source, mode="eval").body)
    if isinstance(call.func, ast.Name) and call.func.id == "print" and len(call.args) == 1 and not call.keywords:
        call = _require_single_call(call.args[0])
    if not isinstance(call.func, ast.Name):
        raise ValueError("it must call a tool by its name")
    pairs = [(str(index), _parse_literal(value)) for index, value in enumerate(call.args)]
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("** is not a literal argument")
        pairs.append((keyword.arg, _parse_literal(keyword.value)))
    return _check_unicode(call.func.id), normalize_json(_reject_duplicate_keys(pairs))


def _parse_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError) as error:  # their texts contain addresses, which differ between runs
        raise ValueError("an argument is not a literal") from error


def _require_single_call(node: ast.expr) -> ast.Call:
    if not isinstance(node, ast.Call):
        raise ValueError("it must be one call, such as crop_video(start_time=3, end_time=9)")
    return node


def _parse_code_call(body: str) -> tuple[str, dict[str, Any]]:
    source = "\n".join(_FENCE_PATTERN.findall(body)) or body
    if not source.strip():
        raise ValueError("there is no code in it")
    return "python", {"code": _check_unicode(source.strip("\n"))}


def normalize_json(value: Any, *, depth: int = 0) -> Any:
    """Return the value with tuples as lists. Raises ValueError unless it is plain JSON within the limits."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _check_unicode(value)
    if isinstance(value, int | float):
        fits = abs(value) < _MAX_INT if isinstance(value, int) else math.isfinite(value)
        if not fits:
            raise ValueError("a number is not finite or too large")
        return value
    if isinstance(value, list | tuple):
        return [normalize_json(item, depth=depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_check_unicode(key): normalize_json(item, depth=depth + 1) for key, item in value.items()}
    raise ValueError(f"a {type(value).__name__} is not a JSON value")


def _check_unicode(value: str) -> str:
    # JSON's \ud800 gives text that can be neither written to a file nor tokenized.
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a text is not valid Unicode")
    return value


DEFAULT_GRAMMAR = Grammar(
    tags=TAG_KINDS,
    call_parsers={"tool_call": _parse_json_call, "tool_code": _parse_python_call, "code": _parse_code_call},
    call_formats={"tool_call": CallFormat.NATIVE, "tool_code": CallFormat.PYTHON_STYLE, "code": CallFormat.NATIVE},
)
