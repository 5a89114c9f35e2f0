"""Make texts safe to show and store: without secrets and control characters, and short."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
NUM_EXAMPLES = 3  # in a message
REDACTED = "[redacted]"
_MIN_SECRET_CHARS = 8  # shorter keys, such as EMPTY, are placeholders that other texts may contain
# Control characters other than tab and line end, marks that override the direction of text, invisible tags, lone
# surrogates.
_CONTROL_PATTERN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_CONTROL_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}


def redact(value: T, secret: str) -> T:
    """Return a text, or plain JSON, without the secret in any of its texts; short secrets are ignored.

    >>> redact({"error": ["no such key: sk-12345678"]}, "sk-12345678")
    {'error': ['no such key: [redacted]']}
    """
    return _redact(value, secret) if len(secret) >= _MIN_SECRET_CHARS else value


def _redact(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return value.replace(secret, REDACTED)
    if isinstance(value, list):
        return [_redact(item, secret) for item in value]
    if isinstance(value, dict):
        return {_redact(key, secret): _redact(item, secret) for key, item in value.items()}
    return value


def escape_control_characters(text: str) -> str:
    r"""Return the text with a visible character in place of each control character other than tab and line end.

    >>> escape_control_characters("a\x1b[31m")
    'a␛[31m'
    """
    return _CONTROL_PATTERN.sub(lambda match: _CONTROL_PICTURES.get(match[0], "\N{REPLACEMENT CHARACTER}"), text)


def join_examples(items: Sequence[str], *, separator: str = ", ") -> str:
    """Return the first items for a message, with an ellipsis in place of the others.

    >>> join_examples(["a", "b"]), join_examples(["a", "b", "c", "d"])
    ('a, b', 'a, b, c, …')
    """
    return separator.join([*items[:NUM_EXAMPLES], *["…"][: len(items) > NUM_EXAMPLES]])
