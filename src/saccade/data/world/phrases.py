"""Every word of the needle world: questions, what the main agent asks and thinks, what a sub-agent says.

To try another way of writing, change it here and nowhere else. Short texts and plain copying are on purpose: a model
of a million parameters learns them from nothing in minutes.
"""

import json
from collections.abc import Sequence

from saccade.data.world.events import Event

NOTHING = "none"
LOOK = "I look closer."  # what the main agent thinks before it calls

QUESTIONS = {
    "at": "What colour is shown at second {second}?",
    "after": "Which colour comes right after {target}?",
    "before": "Which colour comes right before {target}?",
    "count": "How many {target} flashes?",
    "total": "How many flashes?",
    "order": "Which is shown first?",
    "when": "When is {target} shown?",
}


# What a tiny tokenizer should have as one token each: the fixed parts of all that is said here.
PIECES = (
    LOOK,
    " so ",
    "What colour is shown at second ",
    "Which colour comes right after ",
    "Which colour comes right before ",
    "How many ",
    " flashes?",
    "How many flashes?",
    "Which is shown first?",
    "When is ",
    " shown?",
    "I see: ",
    "Which colours?",
    "Which ",
    "When ",
    "\nA. ",
    "\nB. ",
    "\nC. ",
)


def question(kind: str, *, target: str | None, second: float | None) -> str:
    """The question of a task.

    >>> question("at", target=None, second=37)
    'What colour is shown at second 37?'
    """
    name = "total" if kind == "count" and target is None else kind
    return QUESTIONS[name].format(target=target, second="" if second is None else number(second))


def number(value: float) -> str:
    """A number as short as it goes: 37, 0.5."""
    return f"{value:g}"


def span(start: float, end: float) -> str:
    """A stretch of time: 40-42."""
    return f"{number(start)}-{number(end)}"


def asks(kind: str, target: str | None) -> str:
    """What the main agent asks a sub-agent about a window, for a task of this kind.

    >>> asks("order", None), asks("count", "red"), asks("when", "red")
    ('Which colours?', 'Which red?', 'When red?')
    """
    if kind == "when":
        return f"When {target}?"
    return f"Which {target}?" if kind == "count" and target else "Which colours?"


def says(kind: str, events: Sequence[Event]) -> str:
    """What a sub-agent answers: the events that it was asked for, in order; times only where it was asked for times.

    >>> red = Event(start=40, end=42, colour="red")
    >>> says("order", [red, red]), says("when", [red]), says("count", [])
    ('red red', '40-42', 'none')
    """
    if not events:
        return NOTHING
    return " ".join(span(event.start, event.end) if kind == "when" else event.colour for event in events)


def sees(kind: str, events: Sequence[Event], choice: str = "") -> str:
    """What the main agent thinks before its answer: all that it was told or sees itself, copied in order.

    The option that it settles on, if it must name one by its letter, comes last: a letter is then one step away.
    """
    seen = f"I see: {says(kind, events)}"
    return f"{seen} so {choice}" if choice else seen


# ---- the shape of a reply --------------------------------------------------------------------------------------------


def calling(think: str, calls: Sequence[tuple[float, float, str]]) -> str:
    r"""A reply that looks again: (start, end, question) per call.

    >>> calling("Hm.", [(0.0, 16.0, "When red?")])[:60]
    '<think>\nHm.</think><tool_call>{"name": "crop_video", "argume'
    """
    return f"<think>\n{think}</think>" + "".join(_call(*each) for each in calls)


def _call(start: float, end: float, question: str) -> str:
    arguments = {"start_time": _whole(start), "end_time": _whole(end), "question": question}
    return f"<tool_call>{json.dumps({'name': 'crop_video', 'arguments': arguments})}</tool_call>"


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def answering(think: str, answer: str) -> str:
    """A reply that ends the attempt."""
    return f"<think>\n{think}</think><answer>{answer}</answer>"
