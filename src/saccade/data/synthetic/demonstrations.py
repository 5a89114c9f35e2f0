"""What a perfect agent would say, in both roles, as text: the traces of the SFT cold start.

The main agent answers at once where the overview is enough (sometimes); otherwise it calls, all windows in parallel:
for `at` the window of that second, for every other question four windows that cover the clip. A sub-agent sees one
window and is asked for just what the main agent will copy.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from saccade.data.world import phrases
from saccade.data.world.events import COLOURS, Event, within
from saccade.data.world.questions import events_of, visible
from saccade.media.picks import uniform_times
from saccade.types import Demo, Kind, Task

WINDOWS = 4  # that cover a clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call and its answer: the window (seconds), the sub-question, what the sub-agent says.

    >>> Ask(start=0, end=16, question="Which colours?", reply="red blue").reply
    'red blue'
    """

    start: float
    end: float
    question: str
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One attempt: the overview's times, what is thought before the calls ("" without calls), calls, then the end.

    >>> Trace(task="w-1", times=(8.0, 24.0), plan="", asks=(), think="I see: red", answer="red").direct
    True
    """

    task: str  # its id
    times: tuple[float, ...]
    plan: str
    asks: tuple[Ask, ...]
    think: str
    answer: str

    @property
    def direct(self) -> bool:
        """Whether it answers without a call."""
        return not self.asks


def trace(task: Task, times: Sequence[float], rng: random.Random, *, direct: float = 0.4) -> Trace:
    """A right attempt at a task whose overview shows frames at `times`.

    Where the overview is enough, the attempt answers at once with probability `direct`, from what is seen there alone.
    """
    times = tuple(times)
    # Labels of a direct answer come from the frames that are seen, never from the clip's whole truth.
    wanted = _wanted(task)
    # A frame shows that something is there, not when it begins and ends.
    if task.extras["question"] != "when" and visible(task, times) and rng.random() < direct:
        seen = [event for event in wanted if any(event.holds(time) for time in times)]
        return _end(task, times, (), seen)
    asks = tuple(ask(task, start, end) for start, end in windows(task))
    return _end(task, times, asks, wanted)


def demo(task: Task, found: Trace) -> Demo:
    """A trace as a demonstration: what the main agent says in each turn, what the sub-agents of its calls say."""
    end = phrases.answering(found.think, found.answer)
    frames = len(found.times)
    if found.direct:
        return Demo(task=task, frames=frames, replies=(end,))
    look = phrases.calling(found.plan, [(each.start, each.end, each.question) for each in found.asks])
    return Demo(task=task, frames=frames, replies=(look, end), children=(tuple(each.reply for each in found.asks),))


def practice(task: Task, rng: random.Random, *, dense: float = 0.8) -> Demo:
    """Drills as a demonstration with one frame, to be learned from its sub-agents alone: one window, or moments."""
    asks = rng.choice((drills, glances))(task, rng, dense)
    found = Trace(task=task.id, times=uniform_times(task.extras["seconds"], 1), plan="", asks=asks, think="", answer="")
    return replace(demo(task, found), main=False)


def coded(task: Task, fps: float) -> Demo:
    """A right attempt by code, for a prompt that shows no frame: a coarse look that code takes, then a few frames.

    What is shown at a second needs no search.
    """
    second, events = task.extras["second"], events_of(task)
    shown = [second] if second is not None else begins(events, task.extras["seconds"])
    looks = [phrases.finely(shown, fps)] if shown else []
    looks = looks if second is not None else [phrases.coarsely(fps), *looks]
    end = _end(task, (), (), _wanted(task))
    replies = [phrases.coding(phrases.LOOK, code) for code in looks]
    return Demo(task=task, frames=None, replies=(*replies, phrases.answering(end.think, end.answer)))


def drilled(task: Task, rng: random.Random, fps: float | None, *, dense: float = 0.8) -> Demo:
    """What colour is at each of five moments of the task's clip: a question for learning to see, never asked.

    By code, of a clip of so many frames per second; without `fps` from the dense overview of `seen`. A moment shows an
    event with probability `dense`.
    """
    events, seconds = events_of(task), _moments(task, rng, dense)
    shown = [next((event.colour for event in events if event.holds(at)), phrases.NOTHING) for at in seconds]
    said = " ".join(shown)
    asked = replace(
        task, id=f"{task.id}-drill", question=phrases.drill(seconds), kind=Kind.OPEN, gold=said, choices=(), extras={}
    )
    looks = () if fps is None else (phrases.coding(phrases.LOOK, phrases.finely(seconds, fps)),)
    frames = _each_second(task) if fps is None else None
    return Demo(task=asked, frames=frames, replies=(*looks, phrases.answering(f"I see: {said}", said)))


def begins(events: Sequence[Event], seconds: float) -> list[float]:
    """The whole seconds at which something is shown and a second before nothing was: what the coarse look prints."""
    lit = [any(event.holds(t) for event in events) for t in range(round(seconds))]
    return [float(t) for t, on in enumerate(lit) if on and not (t and lit[t - 1])]


def seen(task: Task) -> Demo:
    """An attempt that only reads a dense overview, one frame per second: what looking closer is measured against."""
    frames = _each_second(task)
    end = _end(task, uniform_times(task.extras["seconds"], frames), (), _wanted(task))
    return Demo(task=task, frames=frames, replies=(phrases.answering(end.think, end.answer),))


def _each_second(task: Task) -> int:
    return max(1, round(task.extras["seconds"]))


def _end(task: Task, times: tuple[float, ...], asks: tuple[Ask, ...], seen: Sequence[Event]) -> Trace:
    think = phrases.sees(task.extras["question"], seen)
    plan = phrases.LOOK if asks else ""
    return Trace(task=task.id, times=times, plan=plan, asks=asks, think=think, answer=answer_text(task))


def answer_text(task: Task) -> str:
    """The gold answer as the model should write it: of a choice the option's text, which is copied, not looked up."""
    if task.choices:
        return task.choices["ABCDEFGHIJ".index(str(task.gold))]
    if isinstance(task.gold, tuple):
        return phrases.span(*task.gold)
    return phrases.number(task.gold) if task.kind is Kind.NUMBER and isinstance(task.gold, float) else str(task.gold)


def windows(task: Task) -> list[tuple[float, float]]:
    """The windows (seconds) that the question is worth looking at."""
    if task.extras["question"] == "at":
        return [moment(task.extras["second"])]
    return parts(task.extras["seconds"], WINDOWS)


def moment(second: float) -> tuple[float, float]:
    """The window of one second that begins at `second`: its start is copied from the question, digit for digit."""
    return second, second + 1


def parts(seconds: float, count: int) -> list[tuple[float, float]]:
    """Equal windows that cover a clip.

    >>> parts(64, 4)[1]
    (16.0, 32.0)
    """
    return [(i * seconds / count, (i + 1) * seconds / count) for i in range(count)]


def ask(task: Task, start: float, end: float) -> Ask:
    """The call for one window, and what a sub-agent that sees well says."""
    kind, target = task.extras["question"], task.extras["target"]
    return _ask(task, kind, target, start, end)


def _ask(task: Task, kind: str, target: str | None, start: float, end: float) -> Ask:
    wanted = _asked_for(kind, target, events_of(task))
    shown = list(within(wanted, start, end))
    reply = phrases.scans(shown, start, task.extras["event_seconds"]) if kind == "when" else phrases.says(shown)
    return Ask(start=start, end=end, question=phrases.asks(kind, target), reply=reply)


def _wanted(task: Task) -> list[Event]:
    """The events that bear on the question, in order."""
    kind, second = task.extras["question"], task.extras["second"]
    events = events_of(task)
    if kind == "at":
        return [event for event in events if event.holds(second)]
    return _asked_for(kind, task.extras["target"], events)


def _asked_for(kind: str, target: str | None, events: Sequence[Event]) -> list[Event]:
    if kind in ("count", "when") and target is not None:
        return [event for event in events if event.colour == target]
    return list(events)


def drills(task: Task, rng: random.Random, dense: float) -> tuple[Ask, ...]:
    """Every kind of sub-question about one window of the task's clip, for sub-agents to practise on.

    With probability `dense` the window shows an event. Colours that it shows, and one that it does not (where there is
    one), are asked for.
    """
    events, seconds, length = events_of(task), task.extras["seconds"], task.extras["event_seconds"]
    # Short windows come first to a learner: few frames, and a time that is easy to find.
    options = parts(seconds, WINDOWS if rng.random() < 0.5 else max(WINDOWS, round(seconds / (2 * length))))
    busy = [window for window in options if any(within(events, *window))]
    start, end = rng.choice(busy if busy and rng.random() < dense else options)
    shown = list(dict.fromkeys(event.colour for event in within(events, start, end)))
    missing = [colour for colour in COLOURS if colour not in shown]
    absent = [rng.choice(missing)] if missing else []
    rng.shuffle(shown)
    kinds = [("order", None), ("count", rng.choice([*shown, *absent]))]
    kinds += [("when", colour) for colour in (*absent, *shown[:2])]
    return tuple(_ask(task, kind, target, start, end) for kind, target in kinds)


def glances(task: Task, rng: random.Random, dense: float) -> tuple[Ask, ...]:
    """What colour is at each of five moments; each shows an event with probability `dense`.

    A single frame is where seeing is learned first.
    """
    return tuple(_ask(task, "at", None, *moment(second)) for second in _moments(task, rng, dense))


def _moments(task: Task, rng: random.Random, dense: float) -> list[float]:
    """Five whole seconds of the task's clip, each within an event with probability `dense`."""
    events, length = events_of(task), max(1, int(task.extras["event_seconds"]))
    seconds = [rng.choice(events).start + rng.randrange(length) for _ in range(5)]
    elsewhere = [float(rng.randrange(max(1, int(task.extras["seconds"])))) for _ in seconds]
    return [at if rng.random() < dense else other for at, other in zip(seconds, elsewhere, strict=True)]
