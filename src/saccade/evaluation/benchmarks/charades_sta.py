"""Charades-STA, test: when in a video a sentence comes true."""

import re
from collections.abc import Iterator, Sequence

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, Result, mean
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._spans import seconds_of, tolerant_span
from saccade.types import Kind, Task

_LINE = re.compile(r"(\S+) ([\d.]+) ([\d.]+)##(.+)")
_CLOCK = r"(?:\d{1,2}:)?\d{1,2}:\d{2}"
_KEYWORDS = ("start", "end", "happen")
_NUMBER = re.compile(r"\b(\d+\.\d+\b|\b\d+)\b")


def charades_sta() -> Benchmark:
    """Charades-STA (Gao et al. 2017, arXiv 1705.02101), 3,720 sentences; recall of spans by overlap, and its mean.

    Official is what lmms-eval reads, in this order: a range of clock times, `a - b`, two clock times, the first numbers
    of two sentences, `a - b` anywhere; every "to" is a hyphen first, and until the last only sentences that say start,
    end or happen count where there are any. Reversed spans are swapped; no span is an overlap of 0.
    """
    return Benchmark(
        name="charades_sta",
        hub="lmms-lab/charades_sta",
        patterns=("charades_sta_test.txt", "data/test-*.parquet", "test*.parquet", "*.jsonl"),
        count=3720,
        read=_read,
        official=lambda text, task: _mark(_official(text), task),
        tolerant=lambda text, task: _mark(tolerant_span(text), task),
        headline="miou",
        metrics=_metrics,
    )


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    def recall(least: float) -> float:
        return 100 * mean(results, of=lambda each: each.value >= least)

    return {**{f"r1@{least}": recall(least) for least in (0.3, 0.5, 0.7)}, "miou": 100 * mean(results)}


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    if row.has("line"):
        found = _LINE.fullmatch(row.text("line").strip())
        if found is None:
            raise row.wrong("line", f"it should be 'VIDEO START END##sentence.', not {row.text('line')[:60]!r}")
        video, start, end, sentence = found[1], float(found[2]), float(found[3]), found[4]
    else:
        video, sentence = row.text("video").removesuffix(".mp4"), row.text("caption")
        span = row.texts("timestamp")
        start, end = (row.inner({"timestamp": each}).number_of("timestamp") for each in span[:2])
    if not start < end:
        raise row.wrong("timestamp", f"the span should begin before it ends, not be {start:g} to {end:g}")
    yield Task(
        id=f"{video}-{row.number}",
        question=f"From which second to which second of the video does this happen: {sentence.strip().rstrip('.')}?",
        media=copy.video(f"Charades_v1_480/{video}.mp4", f"videos/{video}.mp4", f"{video}.mp4"),
        kind=Kind.GROUNDING,
        gold=(start, end),
        extras={"caption": sentence.strip()},
    )


def _mark(span: tuple[float, float] | None, task: Task) -> Mark:
    """The overlap of a span with the gold; the gold may end after the video does, so nothing is clamped."""
    if span is None:
        return UNPARSED
    assert isinstance(task.gold, tuple)
    start, end = sorted(span)
    inside = max(0.0, min(end, task.gold[1]) - max(start, task.gold[0]))
    return Mark(read=f"{start:g} - {end:g}", value=inside / (max(end, task.gold[1]) - min(start, task.gold[0])))


def _official(text: str) -> tuple[float, float] | None:
    plain = text.lower().replace("to", "-")
    sentences = re.split(r"[!?\n]", plain)
    told = [each for each in sentences if any(word in each for word in _KEYWORDS)] or sentences
    joined = "\n".join(told)
    first = _clock_range(joined) or _range(joined)
    if first:
        return first
    clocks = [seconds_of(each) for each in re.findall(rf"\b{_CLOCK}\b", joined)]
    firsts = [float(found[1]) for each in told if (found := _NUMBER.search(each))]
    for times in (clocks, firsts):
        if len(times) >= 2:
            return times[0], times[1]
    return _range(plain)  # at last, in the sentences that were passed over


def _clock_range(text: str) -> tuple[float, float] | None:
    found = re.search(rf"\b({_CLOCK})\s*[-–]\s*({_CLOCK})\b", text)
    return (seconds_of(found[1]), seconds_of(found[2])) if found else None


def _range(text: str) -> tuple[float, float] | None:
    found = re.search(r"(?<!\d)(\d+(?:\.\d*)?)\s*[-–]\s*(\d+\.?\d*)", text)
    return (float(found[1]), float(found[2])) if found else None
