"""All texts of the synthetic image dataset: questions, thoughts, calls; see `synthetic/text_templates.py`."""

import json
from collections.abc import Sequence

from saccade.data.synthetic import text_templates as video_templates
from saccade.data.synthetic.events import COLORS
from saccade.data.synthetic.image.objects import DOT, PixelBox, SceneObject
from saccade.data.synthetic.text_templates import LOOK_CLOSER, NONE_TEXT

NormalizedBox = tuple[float, float, float, float]  # left, top, right, bottom, as fractions of the image

QUESTION_TEMPLATES = {
    "colour": "What colour is the dot on the {target} card?",
    "digit": "Which digit is on the {target} card?",
    "letter": "Which letter is on the {target} card?",
    "which": "Which card shows {a}{target}?",
    "count": "How many cards show a {target}?",
    "total": "How many cards?",
    "where": "Where is the card with {a}{target}?",
    "place": "Where is the {target} card?",
}

LAST_OBJECT_QUESTION = "What is the last card?"  # about a grid image

CROP_CODE = (
    "w, h = image_clue_0.size\nfor l, t, r, b in [",
    "]:\n    image_clue_0.crop((l * w, t * h, r * w, b * h)).show()",
)

# The fixed parts of these texts, which a tiny tokenizer should have as one token each.
TOKENIZER_PIECES = (
    *(LOOK_CLOSER, " dot", "Cards: ", "I see: ", " 0.", ", ", "[0.", ", 0.", "]", "(0.", "), (0.", ")"),
    *('{"name": "zoom_image", "arguments": {"left": 0.', ', "top": 0.', ', "right": 0.', ', "bottom": 0.', "}}"),
    LAST_OBJECT_QUESTION,
    *video_templates.split_templates(QUESTION_TEMPLATES),
    *video_templates.OPTION_LABELS,
    *CROP_CODE,
    *video_templates.CODE_DELIMITERS,
)


def format_question(kind: str, *, target: str | None) -> str:
    """Format the question of a task; `target` is a color, a class of symbols, or a symbol as in `format_symbol`.

    >>> format_question("digit", target="red"), format_question("which", target="blue dot")
    ('Which digit is on the red card?', 'Which card shows a blue dot?')
    """
    if target is None:
        return QUESTION_TEMPLATES["total"]
    name = "place" if kind == "where" and target in COLORS else kind
    return QUESTION_TEMPLATES[name].format(target=target, a="a " if target.endswith(" dot") else "")


def format_symbol(scene_object: SceneObject) -> str:
    """Format the symbol of a card as in questions.

    >>> format_symbol(SceneObject(left=0, top=0, side=32, color="red", symbol_class="dot", symbol="blue"))
    'blue dot'
    """
    return f"{scene_object.symbol} dot" if scene_object.symbol_class == DOT else scene_object.symbol


def format_observation(objects: Sequence[SceneObject]) -> str:
    """Format the thought before the answer: every inspected card, in order."""
    return f"I see: {format_objects(objects)}"


def format_objects(objects: Sequence[SceneObject]) -> str:
    """Format cards by color and symbol, in order."""
    return ", ".join(f"{card.color} {format_symbol(card)}" for card in objects) or NONE_TEXT


def format_overview(objects: Sequence[SceneObject], image_side: int) -> str:
    """Format the cards of an overview: color, left and top of each, as fractions of `image_side` pixels.

    They are sorted by color, so that the order depends on which cards there are, not on their positions.

    >>> format_overview([SceneObject(left=96, top=32, side=32, color="red", symbol_class="digit", symbol="7")], 320)
    'Cards: red 0.3 0.1'
    """
    ordered = sorted(objects, key=lambda card: COLORS.index(card.color))
    positions = [(card.color, *normalize_box(card.box, image_side)[:2]) for card in ordered]
    return f"Cards: {', '.join(f'{color} {left:g} {top:g}' for color, left, top in positions) or NONE_TEXT}"


def normalize_box(box: Sequence[float], image_side: int) -> NormalizedBox:
    """Convert a box in pixels to fractions of an image with `image_side` pixels per side.

    >>> normalize_box((96, 32, 128, 64), 320)
    (0.3, 0.1, 0.4, 0.2)
    """
    left, top, right, bottom = (round(side / image_side, 4) for side in box)
    return left, top, right, bottom


def format_box(box: NormalizedBox) -> str:
    """Format a box as in answers and in results of the tool zoom_image."""
    return "[" + ", ".join(f"{side:g}" for side in box) + "]"


def format_zoom_reply(thinking: str, boxes: Sequence[PixelBox], image_side: int) -> str:
    """Format a reply that calls zoom_image for several boxes (pixels) in parallel."""
    parts = [f"<think>\n{thinking}</think>"]
    for box in boxes:
        arguments = dict(zip(("left", "top", "right", "bottom"), normalize_box(box, image_side), strict=True))
        parts.append(f"<tool_call>{json.dumps({'name': 'zoom_image', 'arguments': arguments})}</tool_call>")
    return "".join(parts)


def format_crop_code_reply(thinking: str, boxes: Sequence[PixelBox], image_side: int) -> str:
    """Format a reply whose code crops and shows several boxes (pixels)."""
    box_list = ", ".join(f"({format_box(normalize_box(box, image_side))[1:-1]})" for box in boxes)
    return video_templates.format_code_reply(thinking, f"{CROP_CODE[0]}{box_list}{CROP_CODE[1]}")
