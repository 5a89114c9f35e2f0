"""Sample questions about images, with exact labels and balanced answers.

An entry of `synthetic.image.questions` is `colour`, `digit` or `letter` (the symbol on a card), `which` (card shows a
symbol; a choice of colors), `count` (all cards, or those with a class of symbols) or `where` (is a symbol, or a card; a
box). `Task.extras` holds everything that later stages need (its keys are frozen, since they enter the task's digest,
from which seeds derive):

    question  the kind          target  the color, class of symbols or symbol in question, or null
    cards     [left, top, side, color, symbol class, symbol] each, in pixels      width, height  of the image
    looks     indices in `cards` of the cards that must be inspected
"""

import random
from collections.abc import Sequence
from typing import Any

from saccade.config.schema import SyntheticImageConfig
from saccade.data.source_row import OPTION_LETTERS
from saccade.data.synthetic.events import COLORS
from saccade.data.synthetic.image import text_templates
from saccade.data.synthetic.image.objects import DIGIT, DOT, LETTER, ImageScene, SceneObject
from saccade.data.synthetic.questions import Question, build_choice_questions
from saccade.types import AnswerType, Task

ANSWER_TYPES = {
    "colour": AnswerType.OPEN,
    "digit": AnswerType.OPEN,
    "letter": AnswerType.OPEN,
    "which": AnswerType.CHOICE,
    "count": AnswerType.NUMBER,
    "where": AnswerType.BOX,
}
SYMBOL_QUESTIONS = {"colour": DOT, "digit": DIGIT, "letter": LETTER}  # questions about the symbol of one card
GroundTruth = str | float | tuple[float, ...]


def describe_question(question: Question, scene: ImageScene, _: SyntheticImageConfig) -> tuple[str, dict[str, Any]]:
    """Return the text of a question, and the extras of its task."""
    return text_templates.format_question(question.kind, target=question.target), {
        "question": question.kind,
        "target": question.target,
        **scene.extras,
        "looks": find_objects_to_inspect(question.kind, question.target, scene.objects),
        "width": scene.pixels,
        "height": scene.pixels,
    }


def build_candidates(kind: str, scene: ImageScene, rng: random.Random) -> list[Question]:
    """Build the possible questions of a kind about an image."""
    objects = scene.objects
    by_color, by_symbol = _index_by_unique_labels(objects)
    targets: list[str | None] = [*by_color]
    if kind == "count":
        targets = [None, DOT, DIGIT, LETTER]
    elif kind not in SYMBOL_QUESTIONS:
        targets = [*by_symbol, *(by_color if kind == "where" else ())]
    candidates = []
    for target in targets:
        answer = compute_answer(kind, objects, target=target)
        if answer is not None:
            candidates.append(Question(kind=kind, answer=answer, target=target))
    if kind != "which":
        return candidates
    shown = {card.color for card in objects}
    return [choice for item in candidates for choice in build_choice_questions(item, shown, rng)]


def _index_by_unique_labels(objects: Sequence[SceneObject]) -> tuple[dict[str, SceneObject], dict[str, SceneObject]]:
    """Return the cards whose color no other card has, by color, and those whose symbol no other has, by symbol."""
    colors = [card.color for card in objects]
    symbols = [text_templates.format_symbol(card) for card in objects]
    by_color, by_symbol = (
        {label: card for label, card in zip(labels, objects, strict=True) if labels.count(label) == 1}
        for labels in (colors, symbols)
    )
    return by_color, by_symbol


def compute_answer(kind: str, objects: Sequence[SceneObject], *, target: str | None = None) -> GroundTruth | None:
    """Compute the answer from the labels; None if the question has none. For `which` it is the color of the card.

    >>> cards = [SceneObject(left=32, top=64, side=32, color="red", symbol_class="digit", symbol="7")]
    >>> compute_answer("digit", cards, target="red"), compute_answer("where", cards, target="7")
    ('7', (32.0, 64.0, 64.0, 96.0))
    """
    if kind == "count":
        return float(sum(target in (None, card.symbol_class) for card in objects))
    by_color, by_symbol = _index_by_unique_labels(objects)
    with_color, with_symbol = by_color.get(target or ""), by_symbol.get(target or "")
    if kind in SYMBOL_QUESTIONS:
        return with_color.symbol if with_color and with_color.symbol_class == SYMBOL_QUESTIONS[kind] else None
    if kind == "which":
        # The color must be unique, too.
        return with_symbol.color if with_symbol and with_symbol.color in by_color else None
    card = with_symbol or with_color
    return tuple(map(float, card.box)) if card else None


def find_objects_to_inspect(kind: str, target: str | None, objects: Sequence[SceneObject]) -> list[int]:
    """Return the indices of the cards to inspect: none if the overview is sufficient, one, or all."""
    if kind == "count" and target is None:
        return []
    if kind in SYMBOL_QUESTIONS or target in COLORS:
        return [next(index for index, card in enumerate(objects) if card.color == target)]
    return list(range(len(objects)))


def compute_ground_truth(task: Task, scene: ImageScene) -> GroundTruth | None:
    """Compute the ground truth of a task again from the labels of its image."""
    answer = compute_answer(task.extras["question"], scene.objects, target=task.extras["target"])
    return OPTION_LETTERS[task.options.index(answer)] if isinstance(answer, str) and answer in task.options else answer


def parse_objects(task: Task) -> list[SceneObject]:
    """Parse the cards of a task's image from its extras."""
    names = ("left", "top", "side", "color", "symbol_class", "symbol")
    return [SceneObject(**dict[str, Any](zip(names, card, strict=True))) for card in task.extras["cards"]]
