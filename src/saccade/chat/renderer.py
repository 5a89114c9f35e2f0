"""Render messages to tokens for one checkpoint: only new messages are tokenized, earlier tokens are never changed.

The end of the ledger decides how the next segment begins:

    the ledger ends with                     the segment begins with
    nothing                                  the start of the conversation (system prompt, tools)
    a sampled end-of-turn token              the template's separator between turns
    a reply cut by length, or a prefill      an end-of-turn token, then the separator
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from saccade import plugins
from saccade.chat.families.base import Family, ModelText, Piece, TemplateText
from saccade.chat.families.vision_geometry import VisionGeometry
from saccade.chat.parser import parse_reply
from saccade.chat.tokenizer import ChatTokenizer
from saccade.errors import MediaError, ModelError, convert_errors
from saccade.ledger import ImageRef, ImageSlot, Ledger, Origin, Segment
from saccade.types import Message, Reply
from saccade.utils.files import read_text, require_regular_files

FRAMES_PER_PAIR = 2


class ChatRenderer:
    """A family's template with a checkpoint's tokenizer; implements `protocols.Renderer`."""

    def __init__(
        self, family: Family, tokenizer: ChatTokenizer, vision_geometry: VisionGeometry, vocab_size: int = 0
    ) -> None:
        self.family = family.name
        self.supports_prefix_sharing = family.supports_prefix_sharing
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)  # models have more rows than tokenizers have tokens
        self.factor = vision_geometry.factor
        self.stop_ids = tuple(tokenizer.get_added_token_id(content) for content in family.stop_tokens)
        self.forbidden_ids = tuple(tokenizer.get_added_token_id(content) for content in family.forbidden_tokens)
        self.count_visual_tokens = vision_geometry.count_visual_tokens
        self.patchify = vision_geometry.patchify
        self._family, self._tokenizer, self._vision_geometry = family, tokenizer, vision_geometry
        self._turn_end_id = tokenizer.get_added_token_id(family.turn_end)
        self._image_token_id = tokenizer.get_added_token_id(family.image_token)
        video_token = family.video_token if vision_geometry.temporal_patch_size == FRAMES_PER_PAIR else None
        self._video_token_id = None if video_token is None else tokenizer.get_added_token_id(video_token)
        ids = (self._image_token_id, self._video_token_id)
        # The placeholders: of an image, and of a pair of frames if the model takes those.
        self.visual_ids = tuple(token for token in ids if token is not None)

    def render(
        self, ledger: Ledger, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Segment:
        """Return the segment that appends `messages` to `ledger`, up to the opening of the assistant's next turn.

        `tools` (JSON schemas) are rendered at the start of the conversation and ignored later. The segment's origin is
        PROMPT there, else OBSERVATION. Raises DataError for an unknown role, and MediaError for an image whose
        sides aren't multiples of `factor`, or a pair of frames without `supports_frame_pairs`.
        """
        if ledger.segments:
            pieces = [self._close_turn(ledger), *self._family.render_turns(messages)]
        else:
            pieces = self._family.render_start(messages, tools)
        tokens, slots = self._tokenize([*pieces, self._family.generation_prompt])
        origin = Origin.OBSERVATION if ledger.segments else Origin.PROMPT
        return Segment(tokens=tokens, origin=origin, slots=slots)

    def _close_turn(self, ledger: Ledger) -> TemplateText:
        # A stop token other than the family's end-of-turn token leaves the turn open.
        last = ledger.segments[-1]
        is_closed = last.is_sampled and last.tokens[-1] == self._turn_end_id
        return TemplateText(("" if is_closed else self._family.turn_end) + self._family.turn_separator)

    def _tokenize(self, pieces: Iterable[Piece]) -> tuple[tuple[int, ...], tuple[ImageSlot, ...]]:
        parts: list[int | str] = []
        images: list[ImageRef] = []
        for piece in pieces:
            if isinstance(piece, ImageRef):
                images.append(piece)
                parts.append(self._get_placeholder_id(piece))
            elif isinstance(piece, TemplateText | ModelText):
                parts += self._tokenizer.split(piece.text, is_template=isinstance(piece, TemplateText))
            else:
                parts.append(piece)
        # No text encodes to the placeholder's id, so placeholders and images correspond one to one.
        tokens = self._tokenizer.encode(parts)
        indices = [index for index, token in enumerate(tokens) if token in self.visual_ids]
        slots = [
            ImageSlot(index=index, image=image, num_tokens=self.count_visual_tokens(image))
            for index, image in zip(indices, images, strict=True)
        ]
        return tuple(tokens), tuple(slots)

    @property
    def supports_frame_pairs(self) -> bool:
        """Return whether the model takes pairs of video frames."""
        return self._video_token_id is not None

    def _get_placeholder_id(self, image: ImageRef) -> int:
        if not image.is_pair:
            return self._image_token_id
        if self._video_token_id is None:
            message = f"{image.path}: the model family {self.family} takes no pairs of frames; show single frames"
            raise MediaError(message, key=image.path, value=self.family)
        return self._video_token_id

    def render_prefill(self, text: str) -> Segment:
        """Return the segment of a prefilled reply."""
        return Segment(tokens=self.encode(text), origin=Origin.PREFILL)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode text as a reply: structural tags become their tokens; turn and vision tokens stay plain text."""
        return tuple(self._tokenizer.encode(self._tokenizer.split(text, is_template=False)))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode ids to text, special tokens included."""
        return self._tokenizer.decode(tokens)

    def parse(self, tokens: Sequence[int], *, prefill: Sequence[int] = ()) -> Reply:
        """Parse one turn's ids into a reply, ignoring a stop id at the end; never raises."""
        content = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        # Decoded separately, so that the prefill's length in characters is exact.
        prefix = self.decode(prefill)
        return parse_reply(prefix + self.decode(content), len(prefix))

    def compute_position_ids(self, ledger: Ledger) -> NDArray[np.int64]:
        """Return the M-RoPE positions [3, len(ledger)] of the expanded tokens; sampling continues at maximum + 1."""
        return self._vision_geometry.compute_position_ids(len(ledger), ledger.slots())


def load_renderer(folder: str, family: Family | None = None) -> ChatRenderer:
    """Load the renderer of a checkpoint folder; without `family`, `model_type` in its config.json names it.

    Raises ModelError if the folder isn't a model, its family is unknown, or its tokenizer lacks the family's tokens.
    """
    path = Path(folder) / "config.json"
    with convert_errors(ModelError, f"{folder} can't be used as a model", key=folder):
        require_regular_files(folder)  # transformers opens most of them
    if not path.is_file():
        raise ModelError(f"{folder} is not a model: it has no config.json", key=str(path))
    try:
        config = json.loads(read_text(path))
        model_type = config["model_type"]
        vocab_size = int({**config, **config.get("text_config", {})}.get("vocab_size", 0))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelError(f"{path} is not a model's config: it has no model_type", key="model_type") from error
    if family is None:
        families = plugins.list_plugins("chat.families")
        if model_type not in families:
            message = f"there is no model family {model_type!r}; {plugins.suggest(str(model_type), families)}"
            raise ModelError(message, key="model_type", value=model_type)
        family = cast(Family, plugins.load("chat.families", model_type))
    return ChatRenderer(family, ChatTokenizer(folder), family.load_vision_geometry(folder), vocab_size)
