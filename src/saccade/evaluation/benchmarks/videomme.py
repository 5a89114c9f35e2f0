"""VideoMME: 900 videos of 11 s to 1 h, three four-way questions each, with or without subtitles."""

from collections.abc import Iterator

from saccade.evaluation.benchmarks.answer_extraction import find_first_letter, strip_option_labels
from saccade.evaluation.benchmarks.base import Benchmark, build_accuracy_metrics, grade_choice, group_by_extras
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task

# The published script lacks a comma between two phrases, so neither of them is ever deleted.
STRIPPED_PHRASES = (
    *("The best answer is", "The correct answer is", "The answer is", "The answer"),
    *("The best option isThe correct option is", "Best answer:Best option:"),
    *("Answer:", "Option:", "The correct answer", "The correct option"),
)
_VIDEO_SUFFIXES = (".mp4", ".MP4", ".mkv")
_EXTRA_FIELDS = ("video_id", "videoID", "duration", "domain", "sub_category", "task_type")


def videomme(*, subtitles: bool = False) -> Benchmark:
    """Define VideoMME (Fu et al. 2024, arXiv 2405.21075), 2,700 questions.

    With `subtitles`, `extras["subtitles"]` names each video's subtitle file, relative to the video's folder ("" if it
    has none), and environments show the lines of the frames that they sample.

    Strict: some phrases are deleted, then the first of A-D anywhere is the answer, even inside a word. The official
    script excludes answers it can't parse from the mean; that number is reported as `accuracy_of_answered`.
    """

    def parse_row(row: BenchmarkRow) -> Iterator[Task]:
        stem = row.get_text("videoID")
        options = strip_option_labels(row.get_texts("options"))
        media = row.resolve_video(
            *(f"{folder}{stem}{suffix}" for folder in ("data/", "videos/", "") for suffix in _VIDEO_SUFFIXES)
        )
        extras = {name: row.get_text_or_empty(name) for name in _EXTRA_FIELDS}
        if subtitles:
            is_long = extras["duration"] == "long"  # all long videos have subtitles, of the others some
            extras["subtitles"] = row.resolve_sidecar(media[0], f"subtitle/{stem}.srt", required=is_long)
        yield Task(
            id=row.get_text("question_id"),
            question=row.get_text("question"),
            media=media,
            answer_type=AnswerType.CHOICE,
            ground_truth=row.get_option_letter(len(options), "answer"),
            options=options,
            extras=extras,
        )

    return Benchmark(
        name="videomme_subtitles" if subtitles else "videomme",
        repo_id="lmms-lab/Video-MME",
        file_patterns=("videomme/test-*.parquet", "data/test-*.parquet", "*.jsonl", "videomme.json"),
        num_tasks=2700,
        parse_row=parse_row,
        grade_strict=lambda text, task: grade_choice(find_first_letter(text, STRIPPED_PHRASES, "ABCD"), task),
        compute_metrics=build_accuracy_metrics(lambda result: result.grade.extracted is not None),
        strata=group_by_extras("duration", "domain", "sub_category", "task_type"),
        stratum_sizes={"duration": {"short": 900, "medium": 900, "long": 900}},
        archives=("subtitle.zip",) if subtitles else (),
        num_subtitled_videos=744 if subtitles else None,
    )
