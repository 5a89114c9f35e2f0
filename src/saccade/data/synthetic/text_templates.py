"""Every word of the needle world: questions, what the main agent asks and thinks, what a sub-agent says.

To try another way of writing, change it here and nowhere else. Short texts and plain copying are on purpose: a model
of a million parameters learns them from nothing in minutes.
"""

import json
import math
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


def says(events: Sequence[Event]) -> str:
    """What a sub-agent answers: the colours of the events that it was asked for, in order.

    >>> red = Event(start=40, end=42, colour="red")
    >>> says([red, red]), says([])
    ('red red', 'none')
    """
    return " ".join(event.colour for event in events) or NOTHING


def scans(events: Sequence[Event], start: float, length: float) -> str:
    """What a sub-agent answers when it is asked for a time: moment by moment from `start` on, up to the first event.

    Reading the time of a frame that was found is hard for a small model; finding the frame of a time is easy.

    >>> scans([Event(start=40, end=42, colour="red")], 36, 2)
    '36 38 40 so 40-42'
    """
    if not events:
        return NOTHING
    first = events[0]
    # The first moment at which it is shown; one that began before the window is shown at once.
    steps = max(0, math.ceil((first.start - start) / length - 1e-9))
    moments = [number(start + i * length) for i in range(steps + 1)]
    return f"{' '.join(moments)} so {span(first.start, first.end)}"


def sees(kind: str, events: Sequence[Event]) -> str:
    """What the main agent thinks before its answer: all that it was told or sees itself, copied in order.

    >>> sees("order", [Event(start=40, end=42, colour="red")])
    'I see: red'
    """
    shown = [span(event.start, event.end) if kind == "when" else event.colour for event in events]
    return f"I see: {' '.join(shown) or NOTHING}"


# ---- looking by code ------------------------------------------------------------------------------------------------

COARSE = (
    "frames = video_clue_0.get_batch(range(0, len(video_clue_0), {step})).asnumpy().astype(int)\n"
    "glow = (frames.max(3) - frames.min(3)).max((1, 2)) > {glow}\n"
    "print(*[t for t in range(len(glow)) if glow[t] and not (t and glow[t - 1])])"
)
FINE = ("for t in [", "]:\n    Image.fromarray(video_clue_0[t * {step}].asnumpy()).show()")
GLOW = 90  # how far the channels of a needle's colour lie apart, and those of a background don't
CODE = ("<code>\n```python\n", "\n```\n</code>")  # around code


def code_pieces(fps: float) -> tuple[str, ...]:
    """The fixed parts of the code about videos of so many frames per second."""
    step = round(fps)
    coarse = COARSE.format(step=step, glow=GLOW).splitlines(keepends=True)
    return (*coarse, FINE[0], FINE[1].format(step=step), "Which colours at ")


def drill(seconds: Sequence[float]) -> str:
    """A question about some moments, for practice.

    >>> drill([3, 36])
    'Which colours at 3 36?'
    """
    return f"Which colours at {' '.join(map(number, seconds))}?"


def coarsely(fps: float) -> str:
    """Code that looks at a frame of every second, and prints those at which something colourful begins."""
    return COARSE.format(step=round(fps), glow=GLOW)


def finely(seconds: Sequence[float], fps: float) -> str:
    r"""Code that shows the frames at these seconds.

    >>> finely([12, 36], 4)
    'for t in [12, 36]:\n    Image.fromarray(video_clue_0[t * 4].asnumpy()).show()'
    """
    return f"{FINE[0]}{', '.join(map(number, seconds))}{FINE[1].format(step=round(fps))}"


def coding(think: str, code: str) -> str:
    """A reply that runs code."""
    return f"<think>\n{think}</think>{CODE[0]}{code}{CODE[1]}"


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
