"""PyVision-RL, validation rows: `question`, `answer`, and `image_path` or `video_path`."""

from collections.abc import Iterator

from saccade.data.answers import judged
from saccade.data.raw import Row
from saccade.data.sources._pyvision import declared
from saccade.data.talks import extras_of
from saccade.types import MediaKind, Task

FILES = {"image_path": MediaKind.IMAGE, "video_path": MediaKind.VIDEO}


def pyvision_val(row: Row) -> Iterator[Task]:
    """One task; one that lists options and is answered by one of them is a choice, else its origin says what it is."""
    media = tuple(each for name, kind in FILES.items() if row.has(name) for each in row.media(name, kind))
    if not media:
        raise row.wrong("image_path", "neither it nor video_path names a file")
    found = judged(row, row.text("question"), row.get("answer"), where="answer", declared=declared(row))
    yield Task(
        id=row.id,
        question=found.question,
        media=media,
        kind=found.kind,
        gold=found.gold,
        choices=found.choices,
        extras=extras_of(row, "question", "answer", *FILES),
    )
