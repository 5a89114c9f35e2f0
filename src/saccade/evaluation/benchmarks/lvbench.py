"""LVBench: 103 videos of an hour and more, with questions on one or more of six capabilities."""

from collections.abc import Iterator

from saccade.data.source_row import JsonMapping
from saccade.evaluation.benchmarks.answer_extraction import split_inline_options, strip_option_labels
from saccade.evaluation.benchmarks.base import UNPARSED, Benchmark, Grade, build_accuracy_metrics, grade_choice
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task

CAPABILITIES = {
    "key information retrieval": "KIR",
    "event understanding": "EU",
    "summarization": "Sum",
    "entity recognition": "ER",
    "reasoning": "Rea",
    "temporal grounding": "TG",
}


def lvbench() -> Benchmark:
    """Define LVBench (Wang et al. 2024, arXiv 2406.08035), 1,549 questions.

    Strict: cut at the first `)`, continue after the first `(` if there is one, and take the first character of the
    first word; `The answer is C` therefore gives T. A question counts in each of its capabilities, and the score is the
    mean over questions, not over the six. The official script skips questions without an answer; that number is
    reported as `accuracy_of_answered`.
    """
    return Benchmark(
        name="lvbench",
        repo_id="THUDM/LVBench",
        file_patterns=("video_info.meta.jsonl", "data/train-*.parquet", "*.jsonl", "*.json"),
        num_tasks=1549,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        compute_metrics=build_accuracy_metrics(lambda result: result.answer.error is None),
        strata={"capability": lambda task: task.extras["capabilities"], "genre": lambda task: task.extras["genre"]},
        stratum_sizes={"capability": {"ER": 677, "EU": 647, "KIR": 291, "TG": 220, "Rea": 201, "Sum": 58}},
    )


def _grade_strict(text: str, task: Task) -> Grade:
    # "(B) because (A) …" is B: cut at the first closing bracket before looking for an opening one.
    plain = text.strip().split(")")[0].strip()
    plain = plain.split("(")[1].strip() if "(" in plain else plain
    first = plain.split(" ")[0][:1]
    return grade_choice(first, task) if first else UNPARSED


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    """Yield one video's questions in the published form; one question in flat copies."""
    genre = row.get_text("type")
    if not row.has("qa"):
        key = row.get_text("key", "video", "video_path").removesuffix(".mp4")
        yield _build_task(row, key, genre, str(row.values.get("uid") or f"{key}-{row.number}"))
        return
    for question in row.get_list("qa"):
        inner = row.with_values(row.convert(question, JsonMapping, "qa"))
        yield _build_task(inner, row.get_text("key"), genre, inner.get_text("uid"))


def _build_task(row: BenchmarkRow, key: str, genre: str, uid: str) -> Task:
    stem, options = split_inline_options(row.get_text("question"))
    if not options:
        options = strip_option_labels(row.get_texts("candidates", "options"))
    question_types = row.get_list("question_type")
    capabilities = [CAPABILITIES[row.require_one_of("question_type", name, CAPABILITIES)] for name in question_types]
    # The letter alone, or at the start of the option's text: `(D) 1633`.
    letter = row.get_text("answer").strip().removeprefix("(")[:1]
    return Task(
        id=uid,
        question=stem,
        media=row.resolve_video(f"videos/{key}.mp4", f"video_chunks/{key}.mp4", f"all_videos/{key}.mp4", f"{key}.mp4"),
        answer_type=AnswerType.CHOICE,
        ground_truth=row.with_values({"answer": letter}).get_option_letter(len(options), "answer"),
        options=options,
        extras={"capabilities": capabilities, "genre": genre, "time_reference": row.values.get("time_reference")},
    )
