"""Define the interface of a model family: its chat template as pieces of text, tags and images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.chat.families.vision_geometry import VisionGeometry
from saccade.ledger import ImageRef
from saccade.types import Message


@dataclass(frozen=True, slots=True)
class TemplateText:
    """Text of the template: it may contain any added token."""

    text: str


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text of the model: structural tags become their tokens; turn and vision tokens stay plain text."""

    text: str


Piece = TemplateText | ModelText | str | ImageRef  # a str is text of users or tools and never becomes a special token


class Family(Protocol):
    """A chat template as functions of the new messages, and the family's special tokens."""

    name: str  # config.json's `model_type`
    turn_end: str  # the token that ends a turn
    turn_separator: str  # the template's text between `turn_end` and the next turn
    generation_prompt: TemplateText  # opens the assistant's turn
    image_token: str  # the placeholder of an image
    video_token: str | None  # the placeholder of a pair of video frames; None: the family has no pairs
    stop_tokens: tuple[str, ...]
    forbidden_tokens: tuple[str, ...]  # never sampled
    # Whether only attention carries information between tokens. If not (recurrent layers), a row of a batch is trained
    # as one sequence, so it holds one sample and shares no prefix.
    supports_prefix_sharing: bool

    def render_start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """Render a conversation's first messages, with the system prompt that the template adds."""

    def render_turns(self, messages: Sequence[Message]) -> list[Piece]:
        """Render further messages, each as a closed turn."""

    def load_vision_geometry(self, folder: str) -> VisionGeometry:
        """Load the geometry of the vision tower of the checkpoint in `folder`."""
