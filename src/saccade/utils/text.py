"""Make texts safe to show and store: without secrets and control characters, and short."""

import base64
import functools
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
NUM_EXAMPLES = 3  # in a message
REDACTED = "[redacted]"
_MIN_SECRET_CHARS = 8  # shorter keys, such as EMPTY, are placeholders that other texts may contain
_BLANKS = r"(?:\s|\\[nrt]){0,16}+"  # inside of a secret, also as escapes: texts are wrapped
_HEX_SEPARATOR = r"(?:[\s:,-]|\\x|0x){0,4}+"
_URL_SAFE = {"+": r"[+-]", "/": r"\\{0,4}[/_]"}  # both alphabets of base64; JSON may escape a slash
# Control characters other than tab and line end, marks that override the direction of text, invisible tags, lone
# surrogates.
_CONTROL_PATTERN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_CONTROL_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}


def redact(value: T, secret: str) -> T:
    """Return a text, or plain JSON, without the secret in any of its texts; short secrets are ignored.

    The secret is found as it is, in capital or small letters, with blanks and line ends inside, with any of its
    characters as percent, JSON, Python, XML or quoted-printable escapes, and in base64, base32 or hex, also as a part
    of a longer encoded text. A text that is encoded twice or otherwise, reversed, cut off, or divided among several
    strings is not found. Time is linear in the length of a text.

    >>> redact({"error": ["no such key: sk-12345678"]}, "sk-12345678")
    {'error': ['no such key: [redacted]']}
    """
    return _redact(value, len(secret), _compile_patterns(secret)) if len(secret) >= _MIN_SECRET_CHARS else value


def _redact(value: Any, min_chars: int, patterns: Sequence[re.Pattern[str]]) -> Any:
    if isinstance(value, str):
        if len(value) >= min_chars:  # no encoding is shorter
            for pattern in patterns:
                value = pattern.sub(REDACTED, value)
        return value
    if isinstance(value, list):
        return [_redact(item, min_chars, patterns) for item in value]
    if isinstance(value, dict):
        return {_redact(key, min_chars, patterns): _redact(item, min_chars, patterns) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=16)
def _compile_patterns(secret: str) -> tuple[re.Pattern[str], ...]:
    """Return a pattern for each way to write a secret. Each begins with a character of it, which bounds the search."""
    data = secret.encode("utf-8", "surrogatepass")
    escaped = "(?i:" + _BLANKS.join(f"(?:{'|'.join(_list_escapes(character))})" for character in secret) + ")"
    digits = [f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in data.hex()]
    in_hex = _HEX_SEPARATOR.join(map(operator.add, digits[::2], digits[1::2]))
    return tuple(
        re.compile(pattern)
        for pattern in (
            escaped,
            in_hex,
            *(_build_base_pattern(base64.b64encode, data, skipped, 3, 6) for skipped in range(3)),
            *(_build_base_pattern(base64.b32encode, data, skipped, 5, 5) for skipped in range(5)),
        )
    )


def _list_escapes(character: str) -> list[str]:
    """Return patterns of the ways to write a character of a secret."""
    code, hexadecimal = ord(character), "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    return [
        re.escape(character),
        f"(?i:{hexadecimal}|{hexadecimal.replace('%', '=')})",
        rf"\\{{1,4}}(?i:u\{{?0{{0,6}}{code:x}\}}?|x{code:02x}|{code:03o}|{re.escape(character)})",
        f"&#(?i:x0{{0,6}}{code:x}|0{{0,6}}{code});",
    ]


def _build_base_pattern(
    encode: Callable[[bytes], bytes], data: bytes, num_before: int, group_bytes: int, char_bits: int
) -> str:
    """Return a pattern of data that stands `num_before` bytes after the begin of a group in an encoded text.

    Characters that hold bits of other bytes, too, are left out.
    """
    text = encode(bytes(num_before) + data).decode().rstrip("=")
    first = -(-num_before * 8 // char_bits)
    last = (num_before + len(data)) * 8 // char_bits
    return _BLANKS.join(_URL_SAFE.get(character, character) for character in text[first:last])


def escape_control_characters(text: str) -> str:
    r"""Return the text with a visible character in place of each control character other than tab and line end.

    >>> escape_control_characters("a\x1b[31m")
    'a␛[31m'
    """
    return _CONTROL_PATTERN.sub(lambda match: _CONTROL_PICTURES.get(match[0], "\N{REPLACEMENT CHARACTER}"), text)


def pluralize(count: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless there is one.

    >>> pluralize(1, "file"), pluralize(1234, "file")
    ('1 file', '1,234 files')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def join_examples(items: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first items for a message, with an ellipsis in place of the others.

    >>> join_examples(["a", "b"]), join_examples(["a", "b", "c", "d"])
    ('a, b', 'a, b, c, …')
    """
    return separator.join([*items[:NUM_EXAMPLES], *["…"][: len(items) > NUM_EXAMPLES]])
