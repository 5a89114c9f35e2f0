"""Every word of the worlds of pictures: questions, what is thought, how a box is looked at; see `world/phrases.py`."""

import json
from collections.abc import Sequence

from saccade.data.world import phrases as film
from saccade.data.world.events import COLOURS
from saccade.data.world.phrases import LOOK, NOTHING, answering
from saccade.data.world.still.cards import DOT, Card, Sides

__all__ = ["LOOK", "answering"]

Box = tuple[float, float, float, float]  # left, top, right, bottom, as parts of the picture

QUESTIONS = {
    "colour": "What colour is the dot on the {target} card?",
    "digit": "Which digit is on the {target} card?",
    "letter": "Which letter is on the {target} card?",
    "which": "Which card shows {a}{target}?",
    "count": "How many cards show a {target}?",
    "total": "How many cards?",
    "where": "Where is the card with {a}{target}?",
    "place": "Where is the {target} card?",
}

LAST = "What is the last card?"  # of a chart

CROPS = (
    "w, h = image_clue_0.size\nfor l, t, r, b in [",
    "]:\n    image_clue_0.crop((l * w, t * h, r * w, b * h)).show()",
)

# What a tiny tokenizer should have as one token each, beside the words.
PIECES = (
    LOOK,
    "What colour is the dot on the ",
    "Which digit is on the ",
    "Which letter is on the ",
    "Which card shows ",
    "How many cards show a ",
    "How many cards?",
    "Where is the card with ",
    "Where is the ",
    LAST,
    " card?",
    " dot",
    "Cards: ",
    "I see: ",
    " 0.",
    ", ",
    "\nA. ",
    "\nB. ",
    "\nC. ",
    '{"name": "zoom_image", "arguments": {"left": 0.',
    ', "top": 0.',
    ', "right": 0.',
    ', "bottom": 0.',
    "}}",
    "[0.",
    ", 0.",
    "]",
    "(0.",
    "), (0.",
    ")",
    *CROPS,
    *film.CODE,
)


def question(kind: str, *, target: str | None) -> str:
    """The question of a task; `target` is a colour, a class of marks, or what `mark` says.

    >>> question("digit", target="red"), question("which", target="blue dot")
    ('Which digit is on the red card?', 'Which card shows a blue dot?')
    """
    if target is None:
        return QUESTIONS["total"]
    name = "place" if kind == "where" and target in COLOURS else kind
    return QUESTIONS[name].format(target=target, a="a " if target.endswith(" dot") else "")


def mark(card: Card) -> str:
    """The mark of a card as questions name it.

    >>> mark(Card(left=0, top=0, side=32, colour="red", mark="dot", sign="blue"))
    'blue dot'
    """
    return f"{card.sign} dot" if card.mark == DOT else card.sign


def sees(cards: Sequence[Card]) -> str:
    """What is thought before the answer: every card that was looked at, in order.

    >>> sees([Card(left=0, top=0, side=32, colour="red", mark="digit", sign="7")])
    'I see: red 7'
    """
    return f"I see: {told(cards)}"


def told(cards: Sequence[Card]) -> str:
    """Cards by colour and mark, in order.

    >>> told([Card(left=0, top=0, side=32, colour="red", mark="digit", sign="7")])
    'red 7'
    """
    return ", ".join(f"{card.colour} {mark(card)}" for card in cards) or NOTHING


def spots(cards: Sequence[Card], pixels: int) -> str:
    """What the overview of a picture of so many pixels a side tells: each card's colour, its left and its top.

    By colour, so that what comes first is a question of what is there, not of what is above what.

    >>> spots([Card(left=96, top=32, side=32, colour="red", mark="digit", sign="7")], 320)
    'Cards: red 0.3 0.1'
    """
    ordered = sorted(cards, key=lambda card: COLOURS.index(card.colour))
    places = [(card.colour, *shares(card.box, pixels)[:2]) for card in ordered]
    return f"Cards: {', '.join(f'{colour} {left:g} {top:g}' for colour, left, top in places) or NOTHING}"


def shares(box: Sides, pixels: int) -> Box:
    """A box as parts of a picture of so many pixels a side.

    >>> shares((96, 32, 128, 64), 320)
    (0.3, 0.1, 0.4, 0.2)
    """
    left, top, right, bottom = (round(side / pixels, 4) for side in box)
    return left, top, right, bottom


def sides(box: Box) -> str:
    """A box as an answer, and as the tool zoom_image repeats it.

    >>> sides((0.3, 0.1, 0.4, 0.2))
    '[0.3, 0.1, 0.4, 0.2]'
    """
    return "[" + ", ".join(f"{side:g}" for side in box) + "]"


def zooming(think: str, boxes: Sequence[Sides], pixels: int) -> str:
    r"""A reply that looks at boxes of a picture of so many pixels a side, all at the same time.

    >>> zooming("Hm.", [(96, 32, 128, 64)], 320)[:66]
    '<think>\nHm.</think><tool_call>{"name": "zoom_image", "arguments": '
    """
    return f"<think>\n{think}</think>" + "".join(_call(shares(box, pixels)) for box in boxes)


def coding(think: str, boxes: Sequence[Sides], pixels: int) -> str:
    """The same by code: each box is cut out of the picture and shown."""
    listed = ", ".join(f"({sides(shares(box, pixels))[1:-1]})" for box in boxes)
    return film.coding(think, f"{CROPS[0]}{listed}{CROPS[1]}")


def _call(box: Box) -> str:
    arguments = dict(zip(("left", "top", "right", "bottom"), box, strict=True))
    return f"<tool_call>{json.dumps({'name': 'zoom_image', 'arguments': arguments})}</tool_call>"
