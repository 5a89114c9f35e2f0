"""Charades-STA, test: find the time span that a sentence describes."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import cast

from saccade.evaluation.benchmarks.base import UNPARSED, Benchmark, Grade, GradedAnswer, compute_weighted_mean
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.rewards.answer_types.reader import read_span
from saccade.types import AnswerType, Task
from saccade.utils.numbers import parse_clock

_LINE = re.compile(r"(\S+) ([\d.]+) ([\d.]+)##(.+)")
_CLOCK = r"(?:\d{1,2}:)?\d{1,2}:\d{2}"
_KEYWORDS = ("start", "end", "happen")
_NUMBER = re.compile(r"\b(\d+\.\d+\b|\b\d+)\b")


def charades_sta() -> Benchmark:
    """Define Charades-STA (Gao et al. 2017, arXiv 1705.02101), 3,720 sentences: recall at IoU thresholds, and mean IoU.

    Strict scoring is lmms-eval's, in this order: a range of clock times, `a - b`, two clock times, the first numbers of
    two sentences, `a - b` anywhere. Every "to" becomes a hyphen first; except in the last step only sentences with
    start, end or happen count, if there are any. Reversed spans are swapped; a missing span has an IoU of 0.
    """
    return Benchmark(
        name="charades_sta",
        repo_id="lmms-lab/charades_sta",
        file_patterns=("charades_sta_test.txt", "data/test-*.parquet", "test*.parquet", "*.jsonl"),
        num_tasks=3720,
        parse_row=_parse_row,
        grade_strict=lambda text, task: _grade_span(_extract_span_strict(text), task),
        grade_lenient=lambda text, task: _grade_span(read_span(text), task),
        primary_metric="miou",
        compute_metrics=_compute_metrics,
    )


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    def compute_recall(threshold: float) -> float:
        return 100 * compute_weighted_mean(results, get_value=lambda result: result.value >= threshold)

    recalls = {f"r1@{threshold}": compute_recall(threshold) for threshold in (0.3, 0.5, 0.7)}
    return {**recalls, "miou": 100 * compute_weighted_mean(results)}


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    if row.has("line"):
        match = _LINE.fullmatch(row.get_text("line").strip())
        if match is None:
            problem = f"it should be 'VIDEO START END##sentence.', not {row.get_text('line')[:60]!r}"
            raise row.build_field_error("line", problem)
        video, span, sentence = match[1], match.group(2, 3), match[4]
    else:
        video, sentence = row.get_text("video").removesuffix(".mp4"), row.get_text("caption")
        span = row.get_texts("timestamp")
    if len(span) != 2:
        raise row.build_field_error("timestamp", f"it should be two times, not {len(span)}", span)
    start, end = (row.with_values({"timestamp": time}).get_number("timestamp") for time in span)
    if not -math.inf < start < end < math.inf:
        raise row.build_field_error("timestamp", f"the span should begin before it ends, not be {start:g} to {end:g}")
    yield Task(
        id=f"{video}-{row.number}",
        question=f"From which second to which second of the video does this happen: {sentence.strip().rstrip('.')}?",
        media=row.resolve_video(f"Charades_v1_480/{video}.mp4", f"videos/{video}.mp4", f"{video}.mp4"),
        answer_type=AnswerType.GROUNDING,
        ground_truth=(start, end),
        extras={"caption": sentence.strip()},
    )


def _grade_span(span: tuple[float, float] | None, task: Task) -> Grade:
    """Return the IoU of a span with the ground truth, which may end after the video does, so nothing is clipped."""
    if span is None:
        return UNPARSED
    (start, end), (true_start, true_end) = sorted(span), cast(tuple[float, float], task.ground_truth)
    intersection = max(0.0, min(end, true_end) - max(start, true_start))
    union = max(end, true_end) - min(start, true_start)
    return Grade(extracted=f"{start:g} - {end:g}", value=intersection / union)


def _extract_span_strict(text: str) -> tuple[float, float] | None:
    plain = text.lower().replace("to", "-")
    sentences = re.split(r"[!?\n]", plain)
    relevant = [sentence for sentence in sentences if any(word in sentence for word in _KEYWORDS)] or sentences
    joined = "\n".join(relevant)
    clock_range = re.search(rf"\b({_CLOCK})\s*[-–]\s*({_CLOCK})\b", joined)
    if clock_range:
        return parse_clock(clock_range[1]), parse_clock(clock_range[2])
    if span := _find_range(joined):
        return span
    clocks = [parse_clock(clock) for clock in re.findall(rf"\b{_CLOCK}\b", joined)]
    firsts = [float(match[1]) for sentence in relevant if (match := _NUMBER.search(sentence))]
    for times in (clocks, firsts):
        if len(times) >= 2:
            return times[0], times[1]
    return _find_range(plain)  # finally, in all sentences


def _find_range(text: str) -> tuple[float, float] | None:
    match = re.search(r"(?<!\d)(\d+(?:\.\d*)?)\s*[-–]\s*(\d+\.?\d*)", text)
    return (float(match[1]), float(match[2])) if match else None
