"""Questions with exact labels, and what can be known of their answers without looking.

A question of `world.questions` is a kind (`at`, `after`, `before`, `count`, `order`, `when`); `at`, `after` and
`before` may be asked as a choice: `at:choice`. Everything a later stage needs stands in `Task.extras`:

    question  the kind          target  the colour it asks about, or null      second  of `at`, or null
    events    [start, end, colour] each          seconds  length of the clip   event_seconds  length of an event
    needs     spans that must each be looked at  cover  [start, end): here no slot of an event may go unseen
"""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.config import World
from saccade.data.world import phrases
from saccade.data.world.events import COLOURS, Event, Labels
from saccade.errors import ConfigError
from saccade.types import Kind, Media, Task

KINDS = {"at": Kind.OPEN, "after": Kind.OPEN, "before": Kind.OPEN, "count": Kind.NUMBER, "order": Kind.CHOICE}
KINDS["when"] = Kind.GROUNDING
OPTIONS = 3  # of a choice
# Together with their number among the answers these keep every count below 0.3 of all.
FEW, SOME = 2.7, 1.8  # how often counts 0-1 and 2-… of one colour are asked, next to 1 for each count of all events


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that a clip can be asked, and how often its answer should come up next to the others."""

    kind: str
    answer: str | float | tuple[float, ...]
    target: str | None = None
    second: float | None = None
    choices: tuple[str, ...] = ()
    weight: float = 1.0

    @property
    def slot(self) -> tuple[Any, ...]:
        """The answers that are balanced against each other: those of one kind and one wording."""
        return (self.kind, self.kind == "count" and self.target is None, self.answer)


class Balance:
    """Chooses, over all clips of a split, the questions whose kind and answer were asked least."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds: Counter[str] = Counter()
        self._slots: Counter[tuple[Any, ...]] = Counter()

    def choose(self, pools: dict[str, list[Question]], count: int) -> list[Question]:
        """Take up to `count` questions, kinds in turn; `pools` holds the candidates by kind."""
        left = {kind: list(pool) for kind, pool in pools.items() if pool}
        taken: Counter[str] = Counter()
        chosen: list[Question] = []
        # First every kind twice at most, those that the whole split has least of before the others; then again.
        while left and len(chosen) < count:
            kind = min(left, key=lambda name: (taken[name] // 2, self._kinds[name]))
            self._rng.shuffle(left[kind])  # ties are broken by chance
            best = min(left[kind], key=lambda item: self._slots[item.slot] / item.weight)
            chosen.append(best)
            taken[kind] += 1
            self._kinds[kind] += 1
            self._slots[best.slot] += 1
            left[kind] = [item for item in left[kind] if not _same(item, best)]
            left = {name: pool for name, pool in left.items() if pool}
        return chosen


def _same(one: Question, other: Question) -> bool:
    """Whether two candidates ask the same thing, if with other letters."""
    return (one.target, one.second, set(one.choices)) == (other.target, other.second, set(other.choices))


def draw_tasks(
    world: World, labels: Labels, balance: Balance, rng: random.Random, *, clip: str, name: str
) -> list[Task]:
    """The tasks of one clip; `clip` is its path as written into them, `name` the start of their ids."""
    pools = {entry: _candidates(entry, labels, rng) for entry in world.questions}
    chosen = balance.choose(pools, world.tasks_per_video)
    return [_task(item, labels, world, clip=clip, name=f"{name}-{i}") for i, item in enumerate(chosen)]


def _task(item: Question, labels: Labels, world: World, *, clip: str, name: str) -> Task:
    needs, cover = _needs(item, labels, world.event_seconds)
    extras = {
        "question": item.kind,
        "target": item.target,
        "second": item.second,
        "events": [[event.start, event.end, event.colour] for event in labels.events],
        "needs": needs,
        "cover": cover,
        "seconds": labels.seconds,
        "event_seconds": world.event_seconds,
    }
    text = phrases.question(item.kind, target=item.target, second=item.second)
    kind = Kind.CHOICE if item.choices else KINDS[item.kind]
    media = (Media(path=clip),)
    return Task(id=name, question=text, media=media, kind=kind, gold=item.answer, choices=item.choices, extras=extras)


# ---- what can be asked of a clip -----------------------------------------------------------------------------------


def _candidates(entry: str, labels: Labels, rng: random.Random) -> list[Question]:
    kind, _, form = entry.partition(":")
    if kind not in KINDS or form not in ("", "choice") or (form and kind not in ("at", "after", "before")):
        allowed = ", ".join([*KINDS, "at:choice", "after:choice", "before:choice"])
        raise ConfigError(f"world.questions: there is no question {entry!r}; there are {allowed}")
    if kind == "order":
        return _orders(labels.events, rng)
    if kind == "count":
        return _counts(labels.events)
    asked = [(None, second) for second in _moments(labels.events)] if kind == "at" else _singles(labels.events)
    found = []
    for target, second in asked:
        answer = answer_of(kind, labels.events, target=target, second=second)
        if answer is not None:
            found.append(Question(kind=kind, answer=answer, target=target, second=second))
    shown = {event.colour for event in labels.events}
    return [choice for item in found for choice in as_choices(item, shown, rng)] if form else found


def _moments(events: Sequence[Event]) -> list[float]:
    """The whole seconds inside events (its start, for an event that holds none)."""
    found: list[float] = []
    for event in events:
        whole = [float(t) for t in range(int(event.start), int(event.end) + 1) if event.holds(t)]
        found.extend(whole or [event.start])
    return found


def _singles(events: Sequence[Event]) -> list[tuple[str | None, float | None]]:
    """The colours that are shown exactly once."""
    counts = Counter(event.colour for event in events)
    return [(colour, None) for colour, count in counts.items() if count == 1]


def _counts(events: Sequence[Event]) -> list[Question]:
    targets: list[str | None] = [None, *COLOURS]
    found = []
    for target in targets:
        answer = float(sum(target in (None, event.colour) for event in events))
        weight = 1.0 if target is None else FEW if answer < 2 else SOME
        found.append(Question(kind="count", answer=answer, target=target, weight=weight))
    return found


def _orders(events: Sequence[Event], rng: random.Random) -> list[Question]:
    """Every three colours in every order; a clip that shows only two is asked with one more that it never shows."""
    shown = list(dict.fromkeys(event.colour for event in events))
    if len(shown) == OPTIONS - 1:
        shown.append(rng.choice([colour for colour in COLOURS if colour not in shown]))
    options = itertools.permutations(shown, OPTIONS)
    return [Question(kind="order", answer=_letter(min(each, key=shown.index), each), choices=each) for each in options]


def as_choices(item: Question, shown: Collection[str], rng: random.Random) -> list[Question]:
    """The question with options, once per letter that the answer can have; wrong options are first those `shown`."""
    others = [colour for colour in COLOURS if colour not in (item.answer, item.target)]
    rng.shuffle(others)
    others.sort(key=lambda colour: colour not in shown)
    found = []
    for place in range(OPTIONS):
        choices = others[: OPTIONS - 1]
        choices.insert(place, str(item.answer))
        letter = _letter(str(item.answer), choices)
        found.append(
            Question(kind=item.kind, answer=letter, target=item.target, second=item.second, choices=tuple(choices))
        )
    return found


def _letter(option: str, options: Sequence[str]) -> str:
    return "ABCDEFGHIJ"[list(options).index(option)]


# ---- exact answers -------------------------------------------------------------------------------------------------


def answer_of(
    kind: str, events: Sequence[Event], *, target: str | None = None, second: float | None = None
) -> str | float | tuple[float, float] | None:
    """The answer by the labels alone; None where the question has none. For `order`, the colour shown first.

    >>> shown = [Event(start=4, end=6, colour="red"), Event(start=10, end=12, colour="blue")]
    >>> answer_of("after", shown, target="red"), answer_of("when", shown, target="blue"), answer_of("count", shown)
    ('blue', (10, 12), 2.0)
    """
    if kind == "count":
        return float(sum(target in (None, event.colour) for event in events))
    if kind == "order":
        return events[0].colour if events else None
    if kind == "at":
        return next((event.colour for event in events if second is not None and event.holds(second)), None)
    place = next((i for i, event in enumerate(events) if event.colour == target), None)
    if place is None:
        return None
    if kind == "when":
        return (events[place].start, events[place].end)
    place += 1 if kind == "after" else -1
    return events[place].colour if 0 <= place < len(events) else None


def gold_of(task: Task, events: Sequence[Event]) -> str | float | tuple[float, float] | None:
    """The gold answer of a task, worked out again from the labels of its clip."""
    kind = task.extras["question"]
    if kind == "order":
        events = [event for event in events if event.colour in task.choices]
    answer = answer_of(kind, events, target=task.extras["target"], second=task.extras["second"])
    return _letter(str(answer), task.choices) if task.choices and answer in task.choices else answer


def _needs(item: Question, labels: Labels, length: float) -> tuple[list[list[float]], list[float]]:
    """What must be seen to know the answer: spans, and where nothing may go unseen (only starts that leave the
    least distance to the events already seen count there).
    """
    events = labels.events
    if item.kind == "at":
        return [_pair(next(event for event in events if event.holds(item.second or 0.0)))], [0.0, 0.0]
    if item.kind == "count":
        counted = [_pair(event) for event in events if item.target in (None, event.colour)]
        return counted, [0.0, labels.seconds]
    if item.kind == "order":
        # The first of the options is enough, as long as nothing before it went unseen.
        first = next(event for event in events if event.colour in item.choices)
        return [_pair(first)], [0.0, max(0.0, first.start - length)]
    place = next(i for i, event in enumerate(events) if event.colour == item.target)
    if item.kind == "when":
        return [_pair(events[place])], [0.0, 0.0]
    # Both neighbours, and nothing unseen between them; an event too close to either can't be.
    first, second = events[place : place + 2] if item.kind == "after" else events[place - 1 : place + 1]
    start, end = first.end + length, second.start - length
    return [_pair(first), _pair(second)], [start, max(start, end)]


def _pair(event: Event) -> list[float]:
    return [event.start, event.end]


# ---- what can be known without looking -----------------------------------------------------------------------------


def events_of(task: Task) -> list[Event]:
    """The needles of a task's clip, as its extras hold them."""
    return [Event(start=start, end=end, colour=colour) for start, end, colour in task.extras["events"]]


def visible(task: Task, times: Sequence[float]) -> bool:
    """Whether frames at these times (seconds) are enough to know the answer for certain."""
    extras = task.extras
    if not all(any(start <= time < end for time in times) for start, end in extras["needs"]):
        return False
    length = extras["event_seconds"]
    start, end = extras["cover"]
    slots = [start + i * length for i in range(int((end - start) / length + 1e-9))]
    return all(any(slot <= time < slot + length for time in times) for slot in slots)
