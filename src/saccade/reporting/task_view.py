"""A row of a data set as people look at it: as text, and as one HTML page with its pictures inside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saccade.errors import MediaError
from saccade.media import image, video
from saccade.media.picks import uniform_times
from saccade.types import Demo, Media, MediaKind, Task
from saccade.view.episodes import data_uri, shown_text
from saccade.view.page import filled

FRAMES = 8  # of a video


def text_of(item: Task | Demo) -> str:
    r"""A task or a demonstration in full, a line per field.

    >>> from saccade.types import Kind
    >>> print(text_of(Task(id="w-1", question="Which?", media=(), kind=Kind.CHOICE, gold="B", choices=("red", "blue"))))
    w-1  choice
    Question: Which?
      A. red
    * B. blue
    """
    return "\n".join(shown_text(line) for line in _lines(item))


def _lines(item: Task | Demo) -> Iterator[str]:
    task = item.task if isinstance(item, Demo) else item
    yield f"{task.id}  {task.kind.value}"
    yield from (f"{one.kind.value.capitalize()}: {one.path}{_facts(one)}" for one in task.media)
    yield f"Question: {task.question}"
    for letter, choice in zip("ABCDEFGHIJ", task.choices, strict=False):
        yield f"{'*' if letter == task.gold else ' '} {letter}. {choice}"
    if not task.choices:
        yield f"Gold: {task.gold}"
    yield from (f"{name}: {value}" for name, value in task.extras.items())
    if not isinstance(item, Demo):
        return
    yield f"Frames: {'as the agent has it' if item.frames is None else item.frames}"
    for number, (title, said) in enumerate(_turns(item)):
        yield f"{number + 1}. {title}: {said}"


def _turns(demo: Demo) -> Iterator[tuple[str, str]]:
    for number, reply in enumerate(demo.replies):
        yield "says", reply
        answers = demo.children[number] if number < len(demo.children) else ()
        yield from (("a sub-agent says", answer) for answer in answers)


def _facts(one: Media) -> str:
    """What a file is, as far as it can be opened."""
    try:
        if one.kind is MediaKind.IMAGE:
            picture = image.read(one.path)
            return f" ({picture.width}x{picture.height})"
        clip = video.probe(one.path)
    except MediaError as error:
        return f" ({str(error).removeprefix(f'{one.path} ')})"
    return f" ({clip.width}x{clip.height}, {clip.duration:.1f} s, {clip.frames} frames)"


def page_of(item: Task | Demo, source: Path) -> str:
    """The row as a page: its media (of a video eight frames), question, options, gold answer and replies."""
    task = item.task if isinstance(item, Demo) else item
    return filled(
        "row.html.j2",
        source=source.name,
        id=shown_text(task.id),
        kind=task.kind.value,
        question=shown_text(task.question),
        choices=[
            (letter, shown_text(text), letter == task.gold)
            for letter, text in zip("ABCDEFGHIJ", task.choices, strict=False)
        ],
        gold=shown_text(str(task.gold)),
        extras={shown_text(str(name)): shown_text(str(value)) for name, value in task.extras.items()},
        media=[_medium(one) for one in task.media],
        turns=[(title, shown_text(said)) for title, said in _turns(item)] if isinstance(item, Demo) else [],
    )


def _medium(one: Media) -> dict[str, Any]:
    """A file for the page: its name, what it is, pictures with their times."""
    shown: list[tuple[str, str]] = []
    try:
        if one.kind is MediaKind.IMAGE:
            picture = image.read(one.path)
            shown.append(("", data_uri(image.resized(picture, picture.width, picture.height))))
        else:
            reel = video.survey(one.path)
            times = uniform_times(reel.clip.duration, min(FRAMES, reel.clip.frames))
            shown = [(f"{frame.time:.1f} s", data_uri(frame.pixels)) for frame in video.decode(reel, times)]
    except MediaError as error:
        return {"name": shown_text(Path(one.path).name), "facts": shown_text(str(error)), "frames": []}
    return {"name": shown_text(Path(one.path).name), "facts": _facts(one).strip(" ()"), "frames": shown}
