"""LongVideoBench, validation: questions that refer to a moment of a video of up to an hour."""

from collections.abc import Iterator

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._answers import first_letter
from saccade.evaluation.benchmarks._benchmark import Benchmark, Mark, accuracy, extra
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, tolerant_choice
from saccade.types import Kind, Task, seed_of

PHRASES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option is", "The correct option is", "Best answer:", "Best option:"),
)
_KEPT = ("video_id", "duration_group", "question_category", "topic_category", "level", "duration")
_SUBTITLES = ("subtitle_path", "starting_timestamp_for_subtitles")
_LETTERS = "ABCDE"


def longvideobench(*, random_fallback: bool = False) -> Benchmark:
    """LongVideoBench (Wu et al. 2024, arXiv 2407.15754), the 1,337 validation questions.

    Official: some phrases are deleted, then the first of A-E anywhere is the answer. The published code draws an option
    where there is none; that is 0 here, unless `random_fallback` asks for one, drawn from a digest of the task's id.
    """

    def official(text: str, task: Task) -> Mark:
        letter = first_letter(text, PHRASES, _LETTERS)
        if letter is None and random_fallback:
            letter = _LETTERS[seed_of("random option", task.id) % len(task.choices)]
        return choice_mark(letter, task)

    return Benchmark(
        name="longvideobench",
        hub="longvideobench/LongVideoBench",
        patterns=("lvb_val.json", "validation-*.parquet", "data/validation-*.parquet", "*.jsonl"),
        count=1337,
        read=_read,
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


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    options = row.texts("candidates") if row.has("candidates") else _padded(row)
    # The test split writes -1, so that nobody scores on it by mistake.
    gold = row.number_of("correct_choice")
    if gold not in range(len(options)):
        raise row.wrong("correct_choice", f"it should be below {len(options)}, not {gold:g} (the test split has none)")
    path = row.text("video_path")
    yield Task(
        id=row.text("id"),
        question=row.text("question"),
        media=copy.video(f"videos/{path}", path),
        kind=Kind.CHOICE,
        gold=_LETTERS[int(gold)],
        choices=options,
        extras={
            **{name: row.label(name) for name in _KEPT},
            **{name: row.values.get(name) for name in _SUBTITLES},
        },
    )


def _padded(row: Row) -> tuple[str, ...]:
    """The options of the Parquet form, which has five columns, the last ones "N/A"."""
    return tuple(option for option in (row.text(f"option{at}") for at in range(5)) if option != "N/A")
