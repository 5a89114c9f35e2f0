"""LongVideoBench, validation: questions that refer to a moment of a video of up to an hour."""

import functools
from collections.abc import Iterator
from typing import Any

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._answers import first_letter
from saccade.evaluation.benchmarks._benchmark import Benchmark, Mark, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, tolerant_choice
from saccade.types import Kind, Media, Task, seed_of

PHRASES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option is", "The correct option is", "Best answer:", "Best option:"),
)
_KEPT = ("video_id", "duration_group", "question_category", "topic_category", "level", "duration")
_SUBTITLES = ("subtitle_path", "starting_timestamp_for_subtitles")
_LETTERS = "ABCDE"


def longvideobench(*, random_fallback: bool = False, subtitles: bool = False) -> Benchmark:
    """LongVideoBench (Wu et al. 2024, arXiv 2407.15754), the 1,337 validation questions.

    With `subtitles` each task names its video's file and what is to be taken off its times (`extras["subtitles"]`,
    `extras["subtitles_offset"]`), and agents show the lines of the frames that they sample, as the official input has.

    Official: some phrases are deleted, then the first of A-E anywhere is the answer. The published code draws an option
    where there is none; that is 0 here, unless `random_fallback` asks for one, drawn from a digest of the task's id.
    """

    def official(text: str, task: Task) -> Mark:
        letter = first_letter(text, PHRASES, _LETTERS)
        if letter is None and random_fallback:
            letter = _LETTERS[seed_of("random option", task.id) % len(task.choices)]
        return choice_mark(letter, task)

    return Benchmark(
        name="longvideobench_subtitles" if subtitles else "longvideobench",
        hub="longvideobench/LongVideoBench",
        patterns=("lvb_val.json", "validation-*.parquet", "data/validation-*.parquet", "*.jsonl"),
        count=1337,
        read=functools.partial(_read, subtitles=subtitles),
        official=official,
        tolerant=tolerant_choice,
        headline="accuracy",
        metrics=accuracy,
        strata={name: extra(name) for name in ("duration_group", "question_category", "level", "topic_category")},
        counts={
            "duration_group": {"15": 189, "60": 172, "600": 412, "3600": 564},
            "level": {"L1-Perception": 625, "L2-Relation": 712},
        },
    )


def _read(row: Row, copy: Copy, *, subtitles: bool) -> Iterator[Task]:
    options = row.texts("candidates") if row.has("candidates") else _padded(row)
    # The test split writes -1, so that nobody scores on it by mistake.
    gold = row.number_of("correct_choice")
    if gold not in range(len(options)):
        raise row.wrong("correct_choice", f"it should be below {len(options)}, not {gold:g} (the test split has none)")
    path = row.text("video_path")
    media = copy.video(f"videos/{path}", path)
    yield Task(
        id=row.text("id"),
        question=row.text("question"),
        media=media,
        kind=Kind.CHOICE,
        gold=_LETTERS[int(gold)],
        choices=options,
        extras={
            **{name: row.label(name) for name in _KEPT},
            **{name: row.values.get(name) for name in _SUBTITLES},
            **(_said(row, copy, media[0]) if subtitles else {}),
        },
    )


def _said(row: Row, copy: Copy, media: Media) -> dict[str, Any]:
    """The file of subtitles, and the second of its times at which the clip begins: many are cut from longer videos."""
    name = row.text("subtitle_path")
    return {
        "subtitles": copy.beside(media, f"subtitles/{name}", name, required=True),
        "subtitles_offset": row.number_of("starting_timestamp_for_subtitles"),
    }


def _padded(row: Row) -> tuple[str, ...]:
    """The options of the Parquet form, which has five columns, the last ones "N/A"."""
    return tuple(option for option in (row.text(f"option{at}") for at in range(5)) if option != "N/A")
