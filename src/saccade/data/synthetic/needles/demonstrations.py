"""Build demonstrations for a short cold start: the format, calls and perception, but not where to look.

    of the task   calls at places drawn at random; the answer, if no call shows the needle, is a random guess
    by name       the question names the places, and the calls look there
    auxiliary     sub-agents alone: windows of the clip, most of them with the needle

None of them shows that places depend on the media, so that this remains to be learned by RL.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from saccade.config.schema import NeedlesConfig
from saccade.data.synthetic import text_templates
from saccade.data.synthetic.events import COLORS
from saccade.data.synthetic.needles.clip import NeedleClip
from saccade.data.synthetic.needles.questions import QUESTION_TEMPLATES
from saccade.data.synthetic.text_templates import LOOK_CLOSER, NONE_TEXT
from saccade.types import Demonstration, Task

SUB_AGENT_QUESTION = "What is shown?"
NAMED_QUESTION = "What is shown at {times}?"
LOW, HIGH = "low", "high"  # a sub-agent's reply about a gauge
NEEDLE_SHARE = 0.7  # of the questions that name places, and of auxiliary windows, which show the needle
NUM_AUXILIARY_CALLS = 4  # more than the task allows
NAMED_PER_CLIP = 2

TOKENIZER_PIECES = (
    *(LOOK_CLOSER, "I see: ", SUB_AGENT_QUESTION, "What is shown at "),
    *QUESTION_TEMPLATES.values(),
)


def build_needle_demonstrations(
    task: Task, clip: NeedleClip, settings: NeedlesConfig, rng: random.Random
) -> list[Demonstration]:
    """Build the demonstrations about one clip: one of the task, some that name places, an auxiliary one."""
    demonstrations = [build_random_demonstration(task, clip, settings, rng)]
    demonstrations += [build_named_demonstration(task, clip, settings, rng, number) for number in range(NAMED_PER_CLIP)]
    return [*demonstrations, build_auxiliary_demonstration(task, clip, settings, rng)]


def build_random_demonstration(
    task: Task, clip: NeedleClip, settings: NeedlesConfig, rng: random.Random
) -> Demonstration:
    """Build a demonstration of the task that looks at random places; half of those of `cost` answer at once."""
    places = rng.sample(range(clip.num_places), min(settings.num_calls, clip.num_places))
    turns = [
        places[start : start + settings.calls_per_turn] for start in range(0, len(places), settings.calls_per_turn)
    ]
    if task.extras["question"] == "cost" and rng.random() < 0.5:
        turns = []
    looks: list[list[int]] = []
    for chosen in turns:
        looks.append(chosen)
        if any(_shows_needle(clip, place) for place in chosen):
            break
    is_known = clip.is_shown or any(_shows_needle(clip, place) for chosen in looks for place in chosen)
    answer = clip.needle.color if is_known else rng.choice(COLORS)
    return _build(task, clip, settings, looks, answer)


def build_named_demonstration(
    task: Task, clip: NeedleClip, settings: NeedlesConfig, rng: random.Random, number: int
) -> Demonstration:
    """Build a demonstration whose question names the places to look at, as many as a turn has calls."""
    others = [place for place in range(clip.num_places) if not _shows_needle(clip, place)]
    places = rng.sample(others, min(settings.calls_per_turn, len(others)))
    if not clip.is_shown and rng.random() < NEEDLE_SHARE:
        places[rng.randrange(len(places))] = clip.place
    times = ", ".join(f"{place * clip.place_seconds:g}" for place in places)
    replies = [_describe_window(clip, place) for place in places]
    answer = next((reply for reply in replies if reply == clip.needle.color), NONE_TEXT)
    question = NAMED_QUESTION.format(times=times)
    named = replace(task, id=f"{task.id}-named-{number}", question=question, ground_truth=answer, extras={})
    return _build(named, clip, settings, [places], answer)


def build_auxiliary_demonstration(
    task: Task, clip: NeedleClip, settings: NeedlesConfig, rng: random.Random
) -> Demonstration:
    """Build a demonstration of which only the sub-agents are trained."""
    places = [
        clip.place if not clip.is_shown and rng.random() < NEEDLE_SHARE else rng.randrange(clip.num_places)
        for _ in range(NUM_AUXILIARY_CALLS)
    ]
    demonstration = _build(task, clip, settings, [places], "")
    return replace(demonstration, is_auxiliary=True, frame_budget=1)


def _build(
    task: Task, clip: NeedleClip, settings: NeedlesConfig, looks: Sequence[Sequence[int]], answer: str
) -> Demonstration:
    """Build a demonstration that looks at places, a turn each, and answers."""
    replies, children, seen = list[str](), list[tuple[str, ...]](), list[str]()
    for places in looks:
        starts = [place * clip.place_seconds for place in places]
        calls = [(start, start + settings.window_seconds, SUB_AGENT_QUESTION) for start in starts]
        replies.append(text_templates.format_tool_call_reply(LOOK_CLOSER, calls))
        children.append(tuple(_describe_window(clip, place) for place in places))
        seen += children[-1]
    thought = f"I see: {' '.join(seen) or NONE_TEXT}"
    replies.append(text_templates.format_answer_reply(thought, answer))
    return Demonstration(task=task, frame_budget=None, replies=tuple(replies), children=tuple(children))


def _shows_needle(clip: NeedleClip, place: int) -> bool:
    return place == clip.place and not clip.is_shown


def _describe_window(clip: NeedleClip, place: int) -> str:
    """Return a perfect sub-agent's reply about the window of a place."""
    if _shows_needle(clip, place):
        return clip.needle.color
    if clip.levels:
        return LOW if clip.levels[place] < 0.5 else HIGH
    return NONE_TEXT
