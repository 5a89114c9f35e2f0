"""What a perfect agent would say about a picture, as text: the traces of the SFT cold start.

It first says which cards the overview shows, and where. It answers at once where that is enough, which is where cards
are counted whatever is on them; otherwise it looks at just the cards that the question is about, several at the same
time, and copies what it sees. Or it never looks closer, where the overview is sharp. Charts are practice in seeing.
"""

from collections.abc import Callable, Sequence

from saccade.data.world.still import phrases
from saccade.data.world.still.cards import Card, Sides
from saccade.data.world.still.questions import cards_of
from saccade.types import Demo, Kind, Media, MediaKind, Task

AT_ONCE = 5  # calls per turn, as the agents allow

Look = Callable[[str, Sequence[Sides], int], str]  # a thought, boxes in pixels, the picture's side -> a reply


def demo(task: Task, *, look: Look | None = phrases.zooming) -> Demo:
    """A right attempt at a task; `look` writes the replies that look closer, in the language of an agent's tools.

    Without one the overview is read as if it showed everything.
    """
    cards, side = cards_of(task), int(task.extras["width"])
    seen = [cards[place] for place in task.extras["looks"]]
    thoughts = [phrases.spots(cards, side), *(phrases.LOOK for _ in _turns(seen)[1:])]
    turns = zip(thoughts, _turns(seen), strict=False)
    replies = [look(thought, [card.box for card in some], side) for thought, some in turns] if look else []
    think = phrases.sees(seen) if seen else thoughts[0]
    return Demo(task=task, frames=None, replies=(*replies, phrases.answering(think, answer_text(task))))


def listed(cards: Sequence[Card], *, picture: str, name: str) -> Demo:
    """Practice in seeing: a chart is read whole, since what is asked about is its last card."""
    said = phrases.told(cards[-1:])
    media = (Media(path=picture, kind=MediaKind.IMAGE),)
    task = Task(id=name, question=phrases.LAST, media=media, kind=Kind.OPEN, gold=said)
    return Demo(task=task, frames=None, replies=(phrases.answering(phrases.sees(cards), said),), main=False)


def _turns(cards: Sequence[Card]) -> list[Sequence[Card]]:
    return [cards[start : start + AT_ONCE] for start in range(0, len(cards), AT_ONCE)]


def answer_text(task: Task) -> str:
    """The gold answer as the model should write it: of a choice the option's text, which is copied, not looked up."""
    if task.choices:
        return task.choices["ABC".index(str(task.gold))]
    if isinstance(task.gold, tuple):
        left, top, right, bottom = (round(side) for side in task.gold)
        return phrases.sides(phrases.shares((left, top, right, bottom), int(task.extras["width"])))
    return f"{task.gold:g}" if isinstance(task.gold, float) else task.gold
