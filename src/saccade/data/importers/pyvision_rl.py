"""PyVision-RL, rows for training: `prompt`, `reward_model`, `extra_info`, `mm_hint`, and where they come from."""

from collections.abc import Iterator

from saccade.data.answers import judged
from saccade.data.raw import Row
from saccade.data.sources._pyvision import declared
from saccade.data.talks import asked, messages
from saccade.types import MediaKind, Task


def pyvision_rl(row: Row) -> Iterator[Task]:
    """One task: the question of `extra_info` (else the prompt's words), the file of `mm_hint`, the true answer."""
    info = row.mapping("extra_info") if row.has("extra_info") else {}
    hint, model = row.mapping("mm_hint"), row.mapping("reward_model")
    kinds = {"image": MediaKind.IMAGE, "video": MediaKind.VIDEO}
    kind = kinds.get(str(hint.get("hint_type")))
    if kind is None:
        raise row.wrong("mm_hint.hint_type", f"it should be image or video, not {hint.get('hint_type')!r}")
    paths = hint.get("hint_path")
    if not paths:
        raise row.wrong("mm_hint.hint_path", "it is missing or empty")
    listed = paths if isinstance(paths, list | tuple) else [paths]
    media = tuple(row.medium(path, "mm_hint.hint_path", kind) for path in listed)
    said = "\n".join(asked(each) for each in messages(row, "prompt") if each.role == "user")
    question = row.as_text(info.get("question") or said, "extra_info.question")
    answer = model.get("ground_truth")
    if answer in (None, "", [], {}):
        raise row.wrong("reward_model.ground_truth", "it is missing or empty")
    found = judged(row, question, answer, where="reward_model.ground_truth", declared=declared(row))
    kept = {name: row.values[name] for name in ("data_source", "ability", "env_name") if row.has(name)}
    yield Task(
        id=row.id,
        question=found.question,
        media=media,
        kind=found.kind,
        gold=found.gold,
        choices=found.choices,
        extras={**kept, **{name: value for name, value in info.items() if name not in ("question", "answer")}},
    )
