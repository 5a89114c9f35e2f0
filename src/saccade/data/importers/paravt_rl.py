"""ParaVT-Parquet, rows for RL: `prompt` with `<video>` placeholders, `videos`, `extra_info` in JSON."""

from collections.abc import Iterator

from saccade.data.answers import judged
from saccade.data.raw import Row
from saccade.data.talks import asked, messages
from saccade.types import MediaKind, Task


def paravt_rl(row: Row) -> Iterator[Task]:
    """One task: `extra_info` holds its `answer` and its `question_type` (mcq, tvg, or open by default)."""
    talk = messages(row, "prompt")
    info = row.mapping("extra_info")
    users = [said for said in talk if said.role == "user"]
    media = sum((said.media for said in users), ())
    for name, kind in (("videos", MediaKind.VIDEO), ("images", MediaKind.IMAGE)):
        files = row.media(name, kind) if row.has(name) else ()
        marks = sum(said.text.count(f"<{kind.value}>") for said in users)
        if marks not in (0, len(files)):
            raise row.wrong(name, f"there are {len(files)} files for {marks} <{kind.value}> in the prompt")
        media += files
    if not media:
        raise row.wrong("videos", "the row names no file")
    answer = info.get("answer")
    if answer in (None, "", [], {}):
        raise row.wrong("extra_info.answer", "it is missing or empty")
    question = "\n".join(filter(None, map(asked, users)))
    if not question:
        raise row.wrong("prompt", "its question has no words")
    options = info.get("options") or info.get("choices") or ()
    if not isinstance(options, list | tuple):
        raise row.wrong("extra_info.options", f"they should be a list, not {options!r}")
    declared = str(info.get("question_type") or "oe")
    found = judged(row, question, answer, where="extra_info.answer", declared=declared, choices=tuple(options))
    extras = {name: value for name, value in info.items() if name not in ("answer", "options", "choices")}
    system = "\n".join(said.text for said in talk if said.role == "system")
    yield Task(
        id=row.id,
        question=found.question,
        media=media,
        kind=found.kind,
        gold=found.gold,
        choices=found.choices,
        extras={**extras, **({"system": system} if system else {})},
    )
