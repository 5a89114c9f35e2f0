"""Build demonstrations for the SFT cold start on videos: the replies of a perfect main agent and its sub-agents.

If the overview is sufficient, a share of the demonstrations answer directly; all others call the tool for several
windows in parallel: for `at` the window of that second, for every other question four windows that cover the clip. A
sub-agent sees one window and answers just what the main agent copies.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from saccade.data.source_row import OPTION_LETTERS
from saccade.data.synthetic import text_templates
from saccade.data.synthetic.events import COLORS, Event, find_events_within
from saccade.data.synthetic.questions import parse_events
from saccade.data.visibility import is_answerable
from saccade.types import AnswerType, Demonstration, Task

NUM_WINDOWS = 4  # per clip
EVENT_SHARE = 0.8  # of the windows and seconds of auxiliary demonstrations, which show an event


class SubAgentCall(NamedTuple):
    """One call of a sub-agent: the window (seconds), the sub-question and the reply."""

    start: float
    end: float
    question: str
    reply: str


def build_demonstration(
    task: Task, overview_times: Sequence[float], rng: random.Random, *, direct_share: float
) -> Demonstration:
    """Build a correct demonstration for a task whose overview shows frames at `overview_times` (seconds).

    If the overview is sufficient, it answers directly with probability `direct_share`, from those frames alone.
    """
    # A direct answer mentions only events in the overview's frames, never the clip's complete labels.
    relevant = _find_relevant_events(task)
    # A frame shows that an event is visible, not when it begins and ends.
    if task.extras["question"] != "when" and is_answerable(task, overview_times) and rng.random() < direct_share:
        seen = [event for event in relevant if any(event.is_visible_at(time) for time in overview_times)]
        replies: tuple[str, ...] = (_format_answer_reply(task, seen),)
        return Demonstration(task=task, frame_budget=len(overview_times), replies=replies)
    kind, target, second = (task.extras[name] for name in ("question", "target", "second"))
    windows = [(second, second + 1)] if kind == "at" else split_into_windows(task.extras["seconds"], NUM_WINDOWS)
    calls = [_build_window_call(task, kind, target, start, end) for start, end in windows]
    call_reply = text_templates.format_tool_call_reply(text_templates.LOOK_CLOSER, [call[:3] for call in calls])
    return Demonstration(
        task=task,
        frame_budget=len(overview_times),
        replies=(call_reply, _format_answer_reply(task, relevant)),
        children=(tuple(call.reply for call in calls),),
    )


def build_auxiliary_demonstration(task: Task, rng: random.Random) -> Demonstration:
    """Build an auxiliary demonstration with one overview frame, of which only the sub-agents are trained."""
    calls = rng.choice((build_window_calls, build_second_calls))(task, rng, EVENT_SHARE)
    call_reply = text_templates.format_tool_call_reply("", [call[:3] for call in calls])
    return Demonstration(
        task=task,
        frame_budget=1,
        replies=(call_reply, text_templates.format_answer_reply("", "")),
        children=(tuple(call.reply for call in calls),),
        is_auxiliary=True,
    )


def build_python_demonstration(task: Task, fps: float) -> Demonstration:
    """Build a demonstration whose code scans the clip (unless the question names a second), then shows some frames."""
    second, events = task.extras["second"], parse_events(task)
    shown_seconds = [second] if second is not None else find_event_onsets(events, task.extras["seconds"])
    snippets = [text_templates.format_show_frames_code(shown_seconds, fps)] if shown_seconds else []
    snippets = snippets if second is not None else [text_templates.format_coarse_scan_code(fps), *snippets]
    replies = [text_templates.format_code_reply(text_templates.LOOK_CLOSER, code) for code in snippets]
    answer_reply = _format_answer_reply(task, _find_relevant_events(task))
    return Demonstration(task=task, frame_budget=None, replies=(*replies, answer_reply))


def build_perception_demonstration(task: Task, rng: random.Random, fps: float | None) -> Demonstration:
    """Build a demonstration that names the color at each of five seconds of the clip; it trains perception only.

    With `fps` (of the clip) the frames are shown by code; without it they are in a dense overview, one frame per
    second.
    """
    events, seconds = parse_events(task), _sample_seconds(task, rng, EVENT_SHARE)
    answer = " ".join(
        next((event.color for event in events if event.is_visible_at(second)), text_templates.NONE_TEXT)
        for second in seconds
    )
    perception_task = replace(
        task,
        id=f"{task.id}-drill",
        question=f"Which colours at {' '.join(f'{second:g}' for second in seconds)}?",
        answer_type=AnswerType.OPEN,
        ground_truth=answer,
        options=(),
        extras={},
    )
    answer_reply = text_templates.format_answer_reply(f"I see: {answer}", answer)
    if fps is None:
        return Demonstration(
            task=perception_task, frame_budget=max(1, round(task.extras["seconds"])), replies=(answer_reply,)
        )
    code = text_templates.format_show_frames_code(seconds, fps)
    code_reply = text_templates.format_code_reply(text_templates.LOOK_CLOSER, code)
    return Demonstration(task=perception_task, frame_budget=None, replies=(code_reply, answer_reply))


def find_event_onsets(events: Sequence[Event], seconds: float) -> list[float]:
    """Return the whole seconds at which an event is visible and none was a second before: the coarse scan's output."""
    is_visible = [any(event.is_visible_at(t) for event in events) for t in range(round(seconds))]
    return [float(t) for t, visible in enumerate(is_visible) if visible and not (t and is_visible[t - 1])]


def build_direct_demonstration(task: Task) -> Demonstration:
    """Build a demonstration that only reads a dense overview, one frame per second: the baseline for looking closer."""
    answer_reply = _format_answer_reply(task, _find_relevant_events(task))
    return Demonstration(task=task, frame_budget=max(1, round(task.extras["seconds"])), replies=(answer_reply,))


def _format_answer_reply(task: Task, shown_events: Sequence[Event]) -> str:
    thinking = text_templates.format_observation(task.extras["question"], shown_events)
    return text_templates.format_answer_reply(thinking, format_answer(task))


def format_answer(task: Task) -> str:
    """Return the ground truth as the model should write it; for a choice that is the option's text, not its letter."""
    if task.options:
        return task.options[OPTION_LETTERS.index(str(task.ground_truth))]
    if isinstance(task.ground_truth, tuple):
        return text_templates.format_span(*task.ground_truth)
    return f"{task.ground_truth:g}" if isinstance(task.ground_truth, float) else task.ground_truth


def split_into_windows(seconds: float, count: int) -> list[tuple[float, float]]:
    """Split a clip into equal windows.

    >>> split_into_windows(64, 4)[1]
    (16.0, 32.0)
    """
    return [(i * seconds / count, (i + 1) * seconds / count) for i in range(count)]


def _build_window_call(task: Task, kind: str, target: str | None, start: float, end: float) -> SubAgentCall:
    """Build the call for one window, with the reply of a perfect sub-agent."""
    relevant = _filter_events(kind, target, parse_events(task))
    visible = list(find_events_within(relevant, start, end))
    if kind == "when":
        reply = text_templates.format_time_scan(visible, start, task.extras["event_seconds"])
    else:
        reply = " ".join(event.color for event in visible) or text_templates.NONE_TEXT
    return SubAgentCall(start, end, text_templates.format_sub_agent_question(kind, target), reply)


def _find_relevant_events(task: Task) -> list[Event]:
    """Return the events that the question is about, in order of time."""
    kind, second = task.extras["question"], task.extras["second"]
    events = parse_events(task)
    if kind == "at":
        return [event for event in events if event.is_visible_at(second)]
    return _filter_events(kind, task.extras["target"], events)


def _filter_events(kind: str, target: str | None, events: Sequence[Event]) -> list[Event]:
    if kind in ("count", "when") and target is not None:
        return [event for event in events if event.color == target]
    return list(events)


def build_window_calls(task: Task, rng: random.Random, event_share: float) -> tuple[SubAgentCall, ...]:
    """Build sub-questions of every kind about one window of the clip, as auxiliary training for sub-agents.

    With probability `event_share` the window shows an event. The questions ask for colors in the window and for one
    that is absent, if there is one.
    """
    events, seconds, length = parse_events(task), task.extras["seconds"], task.extras["event_seconds"]
    # Short windows are easier to learn: they have few frames.
    count = NUM_WINDOWS if rng.random() < 0.5 else max(NUM_WINDOWS, round(seconds / (2 * length)))
    windows = split_into_windows(seconds, count)
    with_events = [window for window in windows if any(find_events_within(events, *window))]
    start, end = rng.choice(with_events if with_events and rng.random() < event_share else windows)
    shown = list(dict.fromkeys(event.color for event in find_events_within(events, start, end)))
    not_shown = [color for color in COLORS if color not in shown]
    absent = [rng.choice(not_shown)] if not_shown else []
    rng.shuffle(shown)
    kinds = [("order", None), ("count", rng.choice([*shown, *absent]))]
    kinds += [("when", color) for color in (*absent, *shown[:2])]
    return tuple(_build_window_call(task, kind, target, start, end) for kind, target in kinds)


def build_second_calls(task: Task, rng: random.Random, event_share: float) -> tuple[SubAgentCall, ...]:
    """Build sub-questions about five windows of one second, for perception; `event_share` of them show an event."""
    seconds = _sample_seconds(task, rng, event_share)
    return tuple(_build_window_call(task, "at", None, second, second + 1) for second in seconds)


def _sample_seconds(task: Task, rng: random.Random, event_share: float) -> list[float]:
    """Draw five whole seconds of the clip, each within an event with probability `event_share`."""
    events, length = parse_events(task), max(1, int(task.extras["event_seconds"]))
    seconds = [rng.choice(events).start + rng.randrange(length) for _ in range(5)]
    elsewhere = [float(rng.randrange(max(1, int(task.extras["seconds"])))) for _ in seconds]
    return [second if rng.random() < event_share else other for second, other in zip(seconds, elsewhere, strict=True)]
