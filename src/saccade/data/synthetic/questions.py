"""Sample questions about clips, with exact labels and balanced answers.

An entry of `synthetic.questions` is a kind (`at`, `after`, `before`, `count`, `order`, `when`); `at`, `after` and
`before` also have a multiple-choice form: `at:choice`. `Task.extras` holds everything that later stages need (its keys
are frozen, since they enter the task's digest, from which seeds derive):

    question  the kind          target  the color in question, or null         second  of `at`, or null
    events    [start, end, color] each           seconds  length of the clip   event_seconds  length of an event
    evidence  spans that must each be seen       cover  [start, end) in which every slot of an event must be seen
"""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.config.schema import SyntheticConfig
from saccade.data.source_row import OPTION_LETTERS
from saccade.data.synthetic import text_templates
from saccade.data.synthetic.events import COLORS, Event, Labels
from saccade.types import AnswerType, Task

ANSWER_TYPES = {
    "at": AnswerType.OPEN,
    "after": AnswerType.OPEN,
    "before": AnswerType.OPEN,
    "count": AnswerType.NUMBER,
    "order": AnswerType.CHOICE,
    "when": AnswerType.GROUNDING,
}
NUM_OPTIONS = 3  # of a multiple-choice question
# Sampling weights of counts 0-1 and of counts >= 2 of one color, relative to 1 for each count of all events.
# They keep the share of every count below 0.3.
LOW_COUNT_WEIGHT, COLOR_COUNT_WEIGHT = 2.7, 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A candidate question about a clip, with the relative frequency `weight` that its answer should have."""

    kind: str
    answer: str | float | tuple[float, ...]
    target: str | None = None
    second: float | None = None
    options: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def balance_key(self) -> tuple[Any, ...]:
        """The key of the answer; answers of one kind and one wording are balanced against each other."""
        return (self.kind, self.kind == "count" and self.target is None, self.answer)

    @property
    def wording(self) -> tuple[Any, ...]:
        """The content of the question, without the order of its options."""
        return (self.target, self.second, frozenset(self.options))


class AnswerBalancer:
    """Choose questions over all clips of a split, preferring kinds and answers that were chosen least."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kind_counts: Counter[str] = Counter()
        self._answer_counts: Counter[tuple[Any, ...]] = Counter()

    def select(self, candidates: dict[str, list[Question]], count: int) -> list[Question]:
        """Select up to `count` questions, alternating between kinds; `candidates` are grouped by kind."""
        remaining = {kind: list(pool) for kind, pool in candidates.items() if pool}
        taken: Counter[str] = Counter()
        chosen: list[Question] = []
        # Each round takes at most two questions per kind, beginning with the kinds that the split has least of.
        while remaining and len(chosen) < count:
            kind = min(remaining, key=lambda name: (taken[name] // 2, self._kind_counts[name]))
            self._rng.shuffle(remaining[kind])  # break ties at random
            best = min(remaining[kind], key=lambda item: self._answer_counts[item.balance_key] / item.weight)
            chosen.append(best)
            taken[kind] += 1
            self._kind_counts[kind] += 1
            self._answer_counts[best.balance_key] += 1
            remaining[kind] = [item for item in remaining[kind] if item.wording != best.wording]
            remaining = {name: pool for name, pool in remaining.items() if pool}
        return chosen


def describe_question(question: Question, labels: Labels, config: SyntheticConfig) -> tuple[str, dict[str, Any]]:
    """Return the text of a question, and the extras of its task."""
    evidence, cover = _find_required_spans(question, labels, config.event_seconds)
    text = text_templates.format_question(question.kind, target=question.target, second=question.second)
    return text, {
        "question": question.kind,  # its type; the key is part of the digests and seeds of tasks
        "target": question.target,
        "second": question.second,
        **labels.extras,
        "evidence": evidence,
        "cover": cover,
        "seconds": labels.seconds,
        "event_seconds": config.event_seconds,
    }


def build_candidates(entry: str, labels: Labels, rng: random.Random) -> list[Question]:
    """Build the possible questions of a kind about a clip; `entry` is one of `synthetic.questions`."""
    kind, _, form = entry.partition(":")
    if kind == "order":
        return _build_order_questions(labels.events, rng)
    if kind == "count":
        return _build_count_questions(labels.events)
    arguments: list[tuple[str | None, float | None]]  # target and second
    if kind == "at":
        arguments = [(None, second) for second in _find_event_seconds(labels.events)]
    else:  # about the colors that are shown exactly once
        counts = Counter(event.color for event in labels.events)
        arguments = [(color, None) for color, count in counts.items() if count == 1]
    candidates = []
    for target, second in arguments:
        answer = compute_answer(kind, labels.events, target=target, second=second)
        if answer is not None:
            candidates.append(Question(kind=kind, answer=answer, target=target, second=second))
    if not form:
        return candidates
    shown = {event.color for event in labels.events}
    return [choice for item in candidates for choice in build_choice_questions(item, shown, rng)]


def _find_event_seconds(events: Sequence[Event]) -> list[float]:
    """Return the whole seconds inside events, or an event's start if it contains none."""
    seconds: list[float] = []
    for event in events:
        whole_seconds = [float(t) for t in range(int(event.start), int(event.end) + 1) if event.is_visible_at(t)]
        seconds.extend(whole_seconds or [event.start])
    return seconds


def _build_count_questions(events: Sequence[Event]) -> list[Question]:
    targets: list[str | None] = [None, *COLORS]
    questions = []
    for target in targets:
        answer = float(sum(target in (None, event.color) for event in events))
        weight = 1.0 if target is None else LOW_COUNT_WEIGHT if answer < 2 else COLOR_COUNT_WEIGHT
        questions.append(Question(kind="count", answer=answer, target=target, weight=weight))
    return questions


def _build_order_questions(events: Sequence[Event], rng: random.Random) -> list[Question]:
    """Build a question per permutation of three colors; a clip with two colors gets one that it doesn't show."""
    shown = list(dict.fromkeys(event.color for event in events))
    if len(shown) == NUM_OPTIONS - 1:
        shown.append(rng.choice([color for color in COLORS if color not in shown]))
    return [
        Question(kind="order", answer=OPTION_LETTERS[options.index(min(options, key=shown.index))], options=options)
        for options in itertools.permutations(shown, NUM_OPTIONS)
    ]


def build_choice_questions(question: Question, shown_colors: Collection[str], rng: random.Random) -> list[Question]:
    """Build multiple-choice forms of a question, one per letter of the answer; wrong options are shown colors first."""
    others = [color for color in COLORS if color not in (question.answer, question.target)]
    rng.shuffle(others)
    others.sort(key=lambda color: color not in shown_colors)
    variants = []
    for index in range(NUM_OPTIONS):
        options = others[: NUM_OPTIONS - 1]
        options.insert(index, str(question.answer))
        variants.append(replace(question, answer=OPTION_LETTERS[index], options=tuple(options)))
    return variants


def compute_answer(
    kind: str, events: Sequence[Event], *, target: str | None = None, second: float | None = None
) -> str | float | tuple[float, float] | None:
    """Compute the answer from the labels; None if the question has none. For `order` it is the color shown first.

    >>> events = [Event(start=4, end=6, color="red"), Event(start=10, end=12, color="blue")]
    >>> compute_answer("after", events, target="red"), compute_answer("when", events, target="blue")
    ('blue', (10, 12))
    """
    if kind == "count":
        return float(sum(target in (None, event.color) for event in events))
    if kind == "order":
        return events[0].color if events else None
    if kind == "at":
        return next((event.color for event in events if second is not None and event.is_visible_at(second)), None)
    index = next((i for i, event in enumerate(events) if event.color == target), None)
    if index is None:
        return None
    if kind == "when":
        return (events[index].start, events[index].end)
    index += 1 if kind == "after" else -1
    return events[index].color if 0 <= index < len(events) else None


def compute_ground_truth(task: Task, labels: Labels) -> str | float | tuple[float, float] | None:
    """Compute the ground truth of a task again from the labels of its clip."""
    kind, events = task.extras["question"], labels.events
    if kind == "order":
        events = tuple(event for event in events if event.color in task.options)
    answer = compute_answer(kind, events, target=task.extras["target"], second=task.extras["second"])
    return OPTION_LETTERS[task.options.index(answer)] if isinstance(answer, str) and answer in task.options else answer


def _find_required_spans(
    question: Question, labels: Labels, event_seconds: float
) -> tuple[list[list[float]], list[float]]:
    """Return what must be seen to know the answer: spans, and the range in which no slot of an event may be missed.

    In the range, only starts with the minimum distance to the events already seen count.
    """
    events = labels.events
    if question.kind == "at":
        return [_get_span(next(event for event in events if event.is_visible_at(question.second or 0.0)))], [0.0, 0.0]
    if question.kind == "count":
        spans = [_get_span(event) for event in events if question.target in (None, event.color)]
        return spans, [0.0, labels.seconds]
    if question.kind == "order":
        # The first of the options is sufficient if nothing before it was missed.
        first = next(event for event in events if event.color in question.options)
        return [_get_span(first)], [0.0, max(0.0, first.start - event_seconds)]
    index = next(i for i, event in enumerate(events) if event.color == question.target)
    if question.kind == "when":
        return [_get_span(events[index])], [0.0, 0.0]
    # Both neighbors, and everything between them; no event is closer to either than the minimum distance.
    first, second = events[index : index + 2] if question.kind == "after" else events[index - 1 : index + 1]
    start, end = first.end + event_seconds, second.start - event_seconds
    return [_get_span(first), _get_span(second)], [start, max(start, end)]


def _get_span(event: Event) -> list[float]:
    return [event.start, event.end]


def parse_events(task: Task) -> list[Event]:
    """Parse the events of a task's clip from its extras."""
    return [Event(start=start, end=end, color=color) for start, end, color in task.extras["events"]]
