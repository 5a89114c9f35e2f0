"""LLaVA and ShareGPT: conversations beside the files that they are about."""

from collections.abc import Iterator
from dataclasses import replace

from saccade.data.raw import Row
from saccade.data.talks import demos, extras_of, messages
from saccade.types import Demo, MediaKind

FILES = {
    **dict.fromkeys(("image", "images"), MediaKind.IMAGE),
    **dict.fromkeys(("video", "videos"), MediaKind.VIDEO),
}


def llava(row: Row, *, wrap: bool = True) -> Iterator[Demo]:
    """A demonstration per question of `conversations` (or `messages`), about `image`, `images`, `video` or `videos`.

    Turns of an `observation`, or a user's that begin with `<interpreter>`, are what a tool answered.
    """
    name = "conversations" if row.has("conversations") else "messages"
    talk = messages(row, name)
    media = tuple(each for field, kind in FILES.items() if row.has(field) for each in row.media(field, kind))
    rest = extras_of(row, name, *FILES)
    for demo in demos(row, talk, media=media, wrap=wrap, where=name):
        yield replace(demo, task=replace(demo.task, extras={**rest, **demo.task.extras}))
