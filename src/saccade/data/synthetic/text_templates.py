"""All texts of the synthetic video dataset: questions, the main agent's thoughts and calls, sub-agents' replies.

The texts are short and copy their inputs, so that a model of a million parameters learns them from scratch in minutes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

from saccade.data.synthetic.events import Event

NONE_TEXT = "none"
LOOK_CLOSER = "I look closer."  # the main agent's thought before a call

QUESTION_TEMPLATES = {
    "at": "What colour is shown at second {second}?",
    "after": "Which colour comes right after {target}?",
    "before": "Which colour comes right before {target}?",
    "count": "How many {target} flashes?",
    "total": "How many flashes?",
    "order": "Which is shown first?",
    "when": "When is {target} shown?",
}
OPTION_LABELS = ("\nA. ", "\nB. ", "\nC. ")


def split_templates(templates: Mapping[str, str]) -> list[str]:
    """Return the fixed parts of templates, without single characters."""
    parts = (part for template in templates.values() for part in re.split(r"\{\w+\}", template))
    return [part for part in parts if len(part) > 1]


# The fixed parts of these texts, which a tiny tokenizer should have as one token each.
TOKENIZER_PIECES = (
    *(LOOK_CLOSER, " so ", "I see: ", "Which colours?", "Which ", "When "),
    *split_templates(QUESTION_TEMPLATES),
    *OPTION_LABELS,
)


def format_question(kind: str, *, target: str | None, second: float | None) -> str:
    """Format the question of a task.

    >>> format_question("at", target=None, second=37)
    'What colour is shown at second 37?'
    """
    name = "total" if kind == "count" and target is None else kind
    return QUESTION_TEMPLATES[name].format(target=target, second="" if second is None else f"{second:g}")


def format_span(start: float, end: float) -> str:
    """Format a time span: 40-42."""
    return f"{start:g}-{end:g}"


def format_sub_agent_question(kind: str, target: str | None) -> str:
    """Format the main agent's question to a sub-agent about a window."""
    if kind == "when":
        return f"When {target}?"
    return f"Which {target}?" if kind == "count" and target else "Which colours?"


def format_time_scan(events: Sequence[Event], start: float, step_seconds: float) -> str:
    """Format a sub-agent's reply to `When ...?`: every step from `start` up to the first event, then its span.

    A small model finds the frame of a given time easily, but hardly reads the time of a given frame.

    >>> format_time_scan([Event(start=40, end=42, color="red")], 36, 2)
    '36 38 40 so 40-42'
    """
    if not events:
        return NONE_TEXT
    first = events[0]
    # Steps until the event is visible; 0 for an event that began before the window.
    steps = max(0, math.ceil((first.start - start) / step_seconds - 1e-9))
    times = [f"{start + i * step_seconds:g}" for i in range(steps + 1)]
    return f"{' '.join(times)} so {format_span(first.start, first.end)}"


def format_observation(kind: str, events: Sequence[Event]) -> str:
    """Format the main agent's thought before its answer: the observed or reported events, in order."""
    shown = [format_span(event.start, event.end) if kind == "when" else event.color for event in events]
    return f"I see: {' '.join(shown) or NONE_TEXT}"


# ---- Python --------------------------------------------------------------------------------------------------------

COARSE_SCAN_CODE = (
    "frames = video_clue_0.get_batch(range(0, len(video_clue_0), {step})).asnumpy().astype(int)\n"
    "glow = (frames.max(3) - frames.min(3)).max((1, 2)) > {glow}\n"
    "print(*[t for t in range(len(glow)) if glow[t] and not (t and glow[t - 1])])"
)
SHOW_FRAMES_CODE = ("for t in [", "]:\n    Image.fromarray(video_clue_0[t * {step}].asnumpy()).show()")
COLOR_THRESHOLD = 90  # range of RGB channels that separates event colors from nearly gray backgrounds
CODE_DELIMITERS = ("<code>\n```python\n", "\n```\n</code>")  # around code


def format_coarse_scan_code(fps: float) -> str:
    """Format code that checks one frame per second, and prints the seconds at which a color appears."""
    return COARSE_SCAN_CODE.format(step=round(fps), glow=COLOR_THRESHOLD)


def format_show_frames_code(seconds: Sequence[float], fps: float) -> str:
    """Format code that shows the frames at these seconds."""
    times = ", ".join(f"{second:g}" for second in seconds)
    return f"{SHOW_FRAMES_CODE[0]}{times}{SHOW_FRAMES_CODE[1].format(step=round(fps))}"


def format_code_reply(thinking: str, code: str) -> str:
    """Format a reply that runs code."""
    return f"<think>\n{thinking}</think>{CODE_DELIMITERS[0]}{code}{CODE_DELIMITERS[1]}"


def format_tool_call_reply(thinking: str, calls: Sequence[tuple[float, float, str]]) -> str:
    """Format a reply that calls crop_video: (start, end, question) per call."""
    parts = [f"<think>\n{thinking}</think>"]
    for start, end, question in calls:
        times = {"start_time": start, "end_time": end}
        arguments = {name: int(time) if time == int(time) else time for name, time in times.items()}
        call = {"name": "crop_video", "arguments": {**arguments, "question": question}}
        parts.append(f"<tool_call>{json.dumps(call)}</tool_call>")
    return "".join(parts)


def format_answer_reply(thinking: str, answer: str) -> str:
    """Format a reply that ends the episode."""
    return f"<think>\n{thinking}</think><answer>{answer}</answer>"
