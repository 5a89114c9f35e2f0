"""Questions about a picture, with exact labels.

A question of `world.image.questions` is one of `colour`, `digit` and `letter` (of the mark on a card), `which` (card
shows a mark; a choice of colours), `count` (cards with a class of marks, or all) and `where` (is a mark, or a card; a
box). Everything a later stage needs stands in `Task.extras`:

    question  the kind          target  what it asks about: a colour, a class of marks, a sign, or null
    cards     [left, top, side, colour, mark, sign] each, in pixels      width, height  of the picture
    looks     which cards must be looked at closely, as their places in `cards`
"""

import random
from collections.abc import Sequence
from typing import Any

from saccade.data.world.events import COLOURS
from saccade.data.world.questions import Balance, Question, as_choices
from saccade.data.world.still import phrases
from saccade.data.world.still.cards import DIGIT, DOT, LETTER, Card, Scene, shown_once, unique
from saccade.errors import ConfigError
from saccade.sections import Pictures
from saccade.types import Kind, Media, MediaKind, Task

KINDS = {
    "colour": Kind.OPEN,
    "digit": Kind.OPEN,
    "letter": Kind.OPEN,
    "which": Kind.CHOICE,
    "count": Kind.NUMBER,
    "where": Kind.BOX,
}
ON_CARD = {"colour": DOT, "digit": DIGIT, "letter": LETTER}  # the questions about the mark on one card
Gold = str | float | tuple[float, ...]


def draw_tasks(
    dials: Pictures, scene: Scene, balance: Balance, rng: random.Random, *, picture: str, name: str
) -> list[Task]:
    """The tasks of one picture; `picture` is its path as written into them, `name` the start of their ids."""
    pools = {kind: _candidates(kind, scene.cards, rng) for kind in dials.questions}
    chosen = balance.choose(pools, dials.tasks_per_picture)
    return [_task(item, scene, picture=picture, name=f"{name}-{i}") for i, item in enumerate(chosen)]


def _task(item: Question, scene: Scene, *, picture: str, name: str) -> Task:
    extras = {
        "question": item.kind,
        "target": item.target,
        "cards": [[card.left, card.top, card.side, card.colour, card.mark, card.sign] for card in scene.cards],
        "looks": looks(item.kind, item.target, scene.cards),
        "width": scene.pixels,
        "height": scene.pixels,
    }
    return Task(
        id=name,
        question=phrases.question(item.kind, target=item.target),
        media=(Media(path=picture, kind=MediaKind.IMAGE),),
        kind=KINDS[item.kind],
        gold=item.answer,
        choices=item.choices,
        extras=extras,
    )


# ---- what can be asked of a picture ----------------------------------------------------------------------------------


def _candidates(kind: str, cards: Sequence[Card], rng: random.Random) -> list[Question]:
    if kind not in KINDS:
        raise ConfigError(f"world.image.questions: there is no question {kind!r}; there are {', '.join(KINDS)}")
    if kind in ON_CARD:
        targets: list[str | None] = [card.colour for card in unique(cards) if card.mark == ON_CARD[kind]]
    elif kind == "count":
        targets = [None, DOT, DIGIT, LETTER]
    else:
        targets = [phrases.mark(card) for card in shown_once(cards)]
        targets += [card.colour for card in unique(cards)] if kind == "where" else []
    found = []
    for target in targets:
        answer = answer_of(kind, cards, target=target)
        if answer is not None:
            found.append(Question(kind=kind, answer=answer, target=target))
    shown = {card.colour for card in cards}
    return [choice for item in found for choice in as_choices(item, shown, rng)] if kind == "which" else found


# ---- exact answers -------------------------------------------------------------------------------------------------


def answer_of(kind: str, cards: Sequence[Card], *, target: str | None = None) -> Gold | None:
    """The answer by the labels alone; None where the question has none. For `which`, the colour of the card.

    >>> cards = [Card(left=32, top=64, side=32, colour="red", mark="digit", sign="7")]
    >>> answer_of("digit", cards, target="red"), answer_of("where", cards, target="7"), answer_of("count", cards)
    ('7', (32.0, 64.0, 64.0, 96.0), 1.0)
    """
    if kind == "count":
        return float(sum(target in (None, card.mark) for card in cards))
    if kind in ON_CARD:
        found = [card for card in unique(cards) if card.colour == target and card.mark == ON_CARD[kind]]
        return found[0].sign if found else None
    by_mark = [card for card in shown_once(cards) if phrases.mark(card) == target]
    if kind == "which":
        # The colour must name one card, too.
        return by_mark[0].colour if by_mark and by_mark[0] in unique(cards) else None
    found = by_mark or [card for card in unique(cards) if card.colour == target]
    return tuple(float(side) for side in found[0].box) if found else None


def looks(kind: str, target: str | None, cards: Sequence[Card]) -> list[int]:
    """Which cards must be looked at closely to know the answer: none for what an overview shows, one, or all."""
    if kind == "count" and target is None:
        return []
    if kind in ON_CARD or target in COLOURS:
        return [next(place for place, card in enumerate(cards) if card.colour == target)]
    return list(range(len(cards)))


def gold_of(task: Task, cards: Sequence[Card]) -> Gold | None:
    """The gold answer of a task, worked out again from the labels of its picture."""
    answer = answer_of(task.extras["question"], cards, target=task.extras["target"])
    return "ABC"[task.choices.index(str(answer))] if task.choices and answer in task.choices else answer


def cards_of(task: Task) -> list[Card]:
    """The cards of a task's picture, as its extras hold them."""
    names = ("left", "top", "side", "colour", "mark", "sign")
    return [Card(**dict[str, Any](zip(names, card, strict=True))) for card in task.extras["cards"]]
