"""What a model family is: the scaffold of its chat template, as pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.chat.families._vision import Vision
from saccade.ledger import Picture
from saccade.types import Message


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The template's own text: every added token in it is meant as one."""

    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text in the model's own voice: structural tags are their tokens; turn and vision marks are plain text."""

    text: str


Piece = Scaffold | Spoken | str | Picture  # a bare str is somebody's text: never a special token


class Family(Protocol):
    """A chat template as functions of what is new, and the names of the tokens that matter."""

    name: str  # config.json's `model_type`
    turn_end: str  # the token that ends a turn
    turn_gap: str  # what the template writes between `turn_end` and the next turn
    reply: Scaffold  # what opens the assistant's turn
    placeholder: str  # the token that stands for a picture
    stops: tuple[str, ...]
    forbidden: tuple[str, ...]  # tokens that a model may never sample

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
        """A conversation's first messages, with the system prompt that the template adds."""

    def turns(self, messages: Sequence[Message]) -> list[Piece]:
        """Further messages, each as a closed turn."""

    def vision(self, folder: str) -> Vision:
        """How the checkpoint in `folder` sees pictures."""
