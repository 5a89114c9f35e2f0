"""A renderer without a checkpoint: its ids hold text, so that a server can be told in words what a ledger says.

Who is asked in words makes tokens of them itself, and nobody sees those. So the ids here are no model's: each holds
some bytes of text, four where nothing better is known, or a mark of a turn or of a picture. They can be read back to
the very messages that were rendered, and by their number budgets of tokens are kept to, roughly.
"""

from itertools import groupby, pairwise
from typing import Any

from saccade.chat.families._qwen import QwenFamily
from saccade.chat.families._vision import Vision
from saccade.chat.render import ChatRenderer
from saccade.chat.tokens import Tokens, cutter, utf8
from saccade.ledger import Ledger, Picture
from saccade.types import Message

_FAMILY: Any = QwenFamily(name="text", stops=("<|im_end|>",), forbidden=())
_START, _END, _PICTURE = "<|im_start|>", _FAMILY.turn_end, _FAMILY.placeholder
_NAMES = dict(enumerate((_START, _END, _PICTURE, "<|vision_start|>", "<|vision_end|>"), start=2))
_MARKS = {content: token for token, content in _NAMES.items()}
_USUAL, _MOST = 4, 1024  # bytes of an id: usually, and at most (Python writes no number of over 4300 digits)
_LEAD = b"\x01"  # before the bytes, so that none are lost; a mark is a single byte


def spell(text: str, count: int = 0) -> tuple[int, ...]:
    """Text as `count` ids; where that is not known (0), or would make them very long, as ids of four bytes.

    >>> spell("red"), spell("red", 2), read(spell("red", 2))
    ((24274276,), (370, 91492), 'red')
    """
    data = utf8(text).encode()
    if not 0 < len(data) <= _MOST * count:
        count = -(-len(data) // _USUAL) if data else count
    bounds = [len(data) * place // max(count, 1) for place in range(count + 1)]
    return tuple(int.from_bytes(_LEAD + data[low:high]) for low, high in pairwise(bounds))


def read(tokens: tuple[int, ...]) -> str:
    """The text of ids, marks by their names; U+FFFD for what is none of them."""
    parts = [_NAMES[token].encode() if token in _NAMES else _bytes(token) for token in tokens]
    return b"".join(parts).decode("utf-8", "replace")


def _bytes(token: int) -> bytes:
    data = token.to_bytes(token.bit_length() // 8 + 1).lstrip(b"\x00")
    return data[1:] if data.startswith(_LEAD) else "\N{REPLACEMENT CHARACTER}".encode()


class _TextTokens(Tokens):
    """What a tokenizer does, without one."""

    def __init__(self) -> None:
        self._ids, self._any_added, self._structural = _MARKS, cutter(_MARKS), None

    def _spell(self, text: str) -> list[int]:
        return list(spell(text))

    def decode(self, tokens: tuple[int, ...]) -> str:  # type: ignore[override]
        """Ids to text, marks included."""
        return read(tuple(tokens))


class TextRenderer(ChatRenderer):
    """Renders in text ids; `factor` (pixels) is the side of what counts as one visual token."""

    def __init__(self, factor: int) -> None:
        geometry = Vision(patch=factor, merge=1, temporal=1, mean=(0.0,) * 3, std=(1.0,) * 3)
        super().__init__(_FAMILY, _TextTokens(), geometry)

    def messages(self, ledger: Ledger) -> tuple[Message, ...]:
        """What the ledger says, message by message; the last is the assistant's, open, with what it must begin with.

        Tools are told of in the system message, and what they gave stands in a user's, as the renderer wrote it.

        >>> renderer = TextRenderer(32)
        >>> asked = renderer.render(Ledger(), (Message(role="user", parts=("Which?",)),))
        >>> [(each.role, each.text) for each in renderer.messages(Ledger(segments=(asked,)))]
        [('user', 'Which?'), ('assistant', '')]
        """
        turns: list[list[int]] = []
        inside = False
        for token in ledger.compact():
            if token == _MARKS[_START]:
                turns.append([])
            elif inside and token != _MARKS[_END]:
                turns[-1].append(token)
            inside = token == _MARKS[_START] or (inside and token != _MARKS[_END])
        pictures = list(ledger.pictures())[::-1]
        return tuple(_message(turn, pictures) for turn in turns)


def _message(turn: list[int], pictures: list[Picture]) -> Message:
    parts: list[str | Picture] = []
    plain = [token for token in turn if token not in _NAMES or _NAMES[token] == _PICTURE]
    for shown, group in groupby(plain, lambda token: token == _MARKS[_PICTURE]):
        tokens = tuple(group)
        parts += [pictures.pop() for _ in tokens] if shown else [read(tokens)]
    role, _, first = str(parts[0]).partition("\n")
    return Message(role=role, parts=tuple(part for part in (first, *parts[1:]) if part))
