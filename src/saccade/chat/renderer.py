"""Words to tokens for one checkpoint: only the new is rendered, the past is never tokenised again.

What a ledger ends with decides how the next observation begins. `###` is the end of a turn as sampled:

    ledger ends with          the observation begins with
    nothing                   the conversation's start (system prompt, tools)
    ...###                    the gap that the template writes after a turn's end
    a reply cut by length,    the turn's end, then the gap
    or a forced prefix
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade import plugins
from saccade.chat.families._family import Family, Piece, Scaffold, Spoken
from saccade.chat.families._vision import Vision
from saccade.chat.parse import parse
from saccade.chat.tokens import Tokens
from saccade.errors import ModelError
from saccade.ledger import Ledger, Origin, Picture, Segment, Slot
from saccade.types import Message, Reply


class ChatRenderer:
    """A family's template with a checkpoint's tokenizer; fulfils `protocols.Renderer`."""

    def __init__(self, family: Family, tokens: Tokens, vision: Vision) -> None:
        self.family = family.name
        self.factor = vision.factor
        self.stop_ids = tuple(tokens.special(content) for content in family.stops)
        self.forbidden_ids = tuple(tokens.special(content) for content in family.forbidden)
        self._family, self._tokens, self._vision = family, tokens, vision
        self._turn_end = tokens.special(family.turn_end)
        self._placeholder = tokens.special(family.placeholder)

    def render(
        self, ledger: Ledger, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Segment:
        """What `messages` add to `ledger`, up to the opening of the assistant's next turn.

        `tools` (JSON schemas) are announced where the conversation starts and ignored later. The segment's origin is
        TOOL if a message has the role "tool". Raises DataError for an unknown role and MediaError for a picture whose
        sides don't fit.
        """
        if ledger.segments:
            pieces = [self._closing(ledger), *self._family.turns(messages)]
        else:
            pieces = self._family.start(messages, tools)
        tokens, slots = self._tokenise([*pieces, self._family.reply])
        origin = Origin.TOOL if any(message.role == "tool" for message in messages) else Origin.PROMPT
        return Segment(tokens=tokens, origin=origin, slots=slots)

    def _closing(self, ledger: Ledger) -> Scaffold:
        # Another stop token than the family's own end of turn leaves the turn open.
        last = ledger.segments[-1]
        ended = last.sampled and last.tokens[-1] == self._turn_end
        return Scaffold(self._family.turn_gap if ended else self._family.turn_end + self._family.turn_gap)

    def _tokenise(self, pieces: Iterable[Piece]) -> tuple[tuple[int, ...], tuple[Slot, ...]]:
        parts: list[int | str] = []
        pictures: list[Picture] = []
        for piece in pieces:
            if isinstance(piece, Picture):
                pictures.append(piece)
                parts.append(self._placeholder)
            elif isinstance(piece, str):
                parts.append(piece)
            else:
                parts += self._voice(piece)
        # No text can hold the placeholder's id, so the placeholders found are the pictures given.
        tokens = self._tokens.encode(parts)
        places = [at for at, token in enumerate(tokens) if token == self._placeholder]
        slots = [
            Slot(at=at, picture=picture, tokens=self.visual_tokens(picture))
            for at, picture in zip(places, pictures, strict=True)
        ]
        return tuple(tokens), tuple(slots)

    def _voice(self, piece: Scaffold | Spoken) -> list[int | str]:
        return self._tokens.scaffold(piece.text) if isinstance(piece, Scaffold) else self._tokens.spoken(piece.text)

    def encode(self, text: str) -> tuple[int, ...]:
        """The model's own ids for `text`: structural tags are their tokens; turn and vision marks are plain text."""
        return tuple(self._tokens.encode(self._tokens.spoken(text)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids to text, special tokens included."""
        return self._tokens.decode(tokens)

    def parse(self, tokens: Sequence[int], *, forced: Sequence[int] = ()) -> Reply:
        """One turn's ids, without the stop id that may end them, to a reply; never raises."""
        said = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        # Decoded apart, so that the forced prefix of the text is exactly what was forced.
        prefix = self.decode(forced)
        return parse(prefix + self.decode(said), len(prefix))

    def visual_tokens(self, picture: Picture) -> int:
        """How many visual tokens a picture has; its sides must be multiples of `factor` (else MediaError)."""
        return self._vision.tokens(picture)

    def positions(self, ledger: Ledger) -> NDArray[np.int64]:
        """Explicit M-RoPE positions [3, len(ledger)] of the expanded tokens; sampling goes on at their maximum + 1."""
        return self._vision.positions(len(ledger), ledger.slots())

    def patches(self, pixels: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Pictures (uint8 RGB [H, W, 3] each) to `pixel_values` [patches, values] and `image_grid_thw` [N, 3]."""
        return self._vision.patches(pixels)


def load_renderer(folder: str) -> ChatRenderer:
    """The renderer of a checkpoint folder; its config.json's `model_type` names the family.

    Raises ModelError where the folder is no model, its family is unknown, or its tokenizer lacks the family's tokens.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is not a model: it has no config.json")
    try:
        kind = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is not a model's config: it has no model_type") from error
    family = _find_family(str(kind))
    return ChatRenderer(family, Tokens(folder), family.vision(folder))


def _find_family(name: str) -> Family:
    found = plugins.names("chat.families")
    if name not in found:
        raise ModelError(f"there is no model family {name!r}; {plugins.nearest(name, found)}")
    family: Family = plugins.load("chat.families", name)
    return family
