"""Render conversations as messages, for chat APIs, which return no tokens.

A server renders messages with its own template. So segments hold messages, and their token counts are estimates, for
token limits; the server counts only the tokens of its replies.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from saccade.chat.families._qwen import QwenFamily
from saccade.chat.families.base import TemplateText
from saccade.chat.parser import parse_reply
from saccade.chat.tokenizer import replace_surrogates
from saccade.ledger import ImageRef, ImageSlot, Ledger, Message, Origin, Segment
from saccade.types import Reply

_FAMILY = QwenFamily(name="messages")
BYTES_PER_TOKEN = 4  # as texts are estimated
TOKENS_PER_MESSAGE = 4  # of a template: the turn's start, role and end


class MessageRenderer:
    """Implements `protocols.Renderer` for chat APIs; `factor` is the side of one visual token in pixels.

    The ids of `encode` only measure and truncate text: each holds four bytes.
    """

    stop_ids: tuple[int, ...] = ()
    forbidden_ids: tuple[int, ...] = ()
    vocab_size = 0

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def render(
        self, ledger: Ledger, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Segment:
        """Return the segment that appends `messages`; tool schemas and results are placed as in Qwen's template."""
        pieces = _FAMILY.render_turns(messages) if ledger.segments else _FAMILY.render_start(messages, tools)
        turns: list[tuple[str, list[str | ImageRef]]] = []
        for piece in pieces:
            text = piece if isinstance(piece, str | ImageRef) else piece.text
            if not isinstance(piece, TemplateText):
                turns[-1][1].append(text)
            elif piece.text.startswith("<|im_start|>"):
                turns.append((piece.text.removeprefix("<|im_start|>").rstrip("\n"), []))
            elif not piece.text.startswith(("<|im_end|>", "<|vision_")):
                turns[-1][1].append(piece.text)
        origin = Origin.OBSERVATION if ledger.segments else Origin.PROMPT
        return self._build_segment(origin, [Message(role=role, parts=_join_texts(parts)) for role, parts in turns])

    def render_prefill(self, text: str) -> Segment:
        """Return the segment of a prefilled reply."""
        return self._build_segment(Origin.PREFILL, [Message(role="assistant", parts=(text,))])

    def _build_segment(self, origin: Origin, messages: Sequence[Message]) -> Segment:
        images = [part for message in messages for part in message.parts if isinstance(part, ImageRef)]
        slots = [
            ImageSlot(index=index, image=image, num_tokens=max(image.width * image.height // self.factor**2, 1))
            for index, image in enumerate(images)
        ]
        num_tokens = sum(len(self.encode(message.text)) + TOKENS_PER_MESSAGE for message in messages)
        num_tokens += sum(slot.num_tokens for slot in slots)
        return Segment(
            tokens=(), origin=origin, slots=tuple(slots), messages=tuple(messages), num_message_tokens=num_tokens
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return one id per four bytes of the text."""
        data = replace_surrogates(text).encode()
        chunks = [data[start : start + BYTES_PER_TOKEN] for start in range(0, len(data), BYTES_PER_TOKEN)]
        return tuple(int.from_bytes(b"\x01" + chunk) for chunk in chunks)  # the first byte keeps leading zeros

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids; a character that they truncate becomes U+FFFD."""
        data = b"".join(token.to_bytes(BYTES_PER_TOKEN + 1).lstrip(b"\x00")[1:] for token in tokens)
        return data.decode("utf-8", "replace")

    def parse(self, tokens: Sequence[int], *, prefill: Sequence[int] = ()) -> Reply:
        """Parse the ids of a text."""
        prefix = self.decode(prefill)
        return parse_reply(prefix + self.decode(tokens), len(prefix))


def _join_texts(parts: Sequence[str | ImageRef]) -> tuple[str | ImageRef, ...]:
    """Join adjacent texts, and drop empty ones."""
    joined: list[str | ImageRef] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        if is_text:
            joined.append("".join(map(str, group)))
        else:
            joined.extend(group)
    return tuple(part for part in joined if part)
