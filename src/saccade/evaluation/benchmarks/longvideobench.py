"""LongVideoBench, validation: questions about a moment of a video of up to an hour."""

import functools
from collections.abc import Iterator
from typing import Any

from saccade.evaluation.benchmarks.answer_extraction import find_first_letter
from saccade.evaluation.benchmarks.base import Benchmark, Grade, grade_choice, group_by_extras
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task
from saccade.utils.hashing import derive_seed

STRIPPED_PHRASES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option is", "The correct option is", "Best answer:", "Best option:"),
)
_EXTRA_FIELDS = ("video_id", "duration_group", "question_category", "topic_category", "level", "duration")
_SUBTITLE_FIELDS = ("subtitle_path", "starting_timestamp_for_subtitles")
_LETTERS = "ABCDE"


def longvideobench(*, random_fallback: bool = False, subtitles: bool = False) -> Benchmark:
    """Define LongVideoBench (Wu et al. 2024, arXiv 2407.15754), the 1,337 validation questions.

    With `subtitles` each task names its subtitle file and the offset of its times (`extras["subtitles"]`,
    `extras["subtitles_offset"]`), and environments show the lines of the frames that they sample, as in the official
    input.

    Strict: some phrases are deleted, then the first of A-E anywhere is the answer. The published code draws a random
    option if there is none; that scores 0 here, unless `random_fallback` draws one from a digest of the task's id.
    """

    def grade_strict(text: str, task: Task) -> Grade:
        letter = find_first_letter(text, STRIPPED_PHRASES, _LETTERS)
        if letter is None and random_fallback:
            letter = _LETTERS[derive_seed("random option", task.id) % len(task.options)]
        return grade_choice(letter, task)

    return Benchmark(
        name="longvideobench_subtitles" if subtitles else "longvideobench",
        repo_id="longvideobench/LongVideoBench",
        file_patterns=("lvb_val.json", "validation-*.parquet", "data/validation-*.parquet", "*.jsonl"),
        num_tasks=1337,
        parse_row=functools.partial(_parse_row, subtitles=subtitles),
        grade_strict=grade_strict,
        strata=group_by_extras("duration_group", "question_category", "level", "topic_category"),
        stratum_sizes={
            "duration_group": {"15": 189, "60": 172, "600": 412, "3600": 564},
            "level": {"L1-Perception": 625, "L2-Relation": 712},
        },
    )


def _parse_row(row: BenchmarkRow, *, subtitles: bool) -> Iterator[Task]:
    if row.has("candidates"):
        options = row.get_texts("candidates")
    else:  # the Parquet form: five columns, unused ones "N/A"
        options = tuple(option for option in (row.get_text(f"option{i}") for i in range(5)) if option != "N/A")
    # The test split has -1, which marks hidden answers.
    answer_index = row.get_number("correct_choice")
    if answer_index not in range(len(options)):
        problem = f"it should be below {len(options)}, not {answer_index:g} (the test split has none)"
        raise row.build_field_error("correct_choice", problem)
    path = row.get_text("video_path")
    media = row.resolve_video(f"videos/{path}", path)
    extras: dict[str, Any] = {name: row.get_text_or_empty(name) for name in _EXTRA_FIELDS}
    extras |= {name: row.values.get(name) for name in _SUBTITLE_FIELDS}
    if subtitles:
        name = row.get_text("subtitle_path")
        extras["subtitles"] = row.resolve_sidecar(media[0], f"subtitles/{name}", name, required=True)
        # Seconds at which the clip begins: many clips are cut from longer videos.
        extras["subtitles_offset"] = row.get_number("starting_timestamp_for_subtitles")
    yield Task(
        id=row.get_text("id"),
        question=row.get_text("question"),
        media=media,
        answer_type=AnswerType.CHOICE,
        ground_truth=_LETTERS[int(answer_index)],
        options=options,
        extras=extras,
    )
