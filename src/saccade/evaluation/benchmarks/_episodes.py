"""Benchmarks over the rollout path: an episode's answer, its score, and the report of a results file.

score = scorer(benchmark, "official")      what `evaluation.run.evaluate` is given
results = results_of(benchmark, scored)    its episodes marked again: a rule that was mended needs no new episodes
reported(benchmark, scored, ...)           the report, once a referee has decided what the rule left open
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from saccade.evaluation.benchmarks._benchmark import (
    Answer,
    Benchmark,
    Extractor,
    Report,
    Result,
    marked,
    report,
)
from saccade.evaluation.benchmarks._judging import Referee
from saccade.evaluation.metrics import failed
from saccade.runlog import write_text
from saccade.types import Episode, Score, Scored, Task


def answer_of(episode: Episode) -> Answer:
    """All that the main agent said in its last turn; an error where the episode broke or nothing was said."""
    if failed(episode):
        return Answer(text="", error=episode.error or f"the episode ended as {episode.end}")
    # The last turn alone: what was thought out loud before a call is no answer.
    text = episode.turns[-1].reply.text if episode.turns else ""
    return Answer(text=text) if text.strip() else Answer(text="", error="the answer is blank")


def scorer(benchmark: Benchmark, extractor: Extractor) -> Callable[[Episode, Task], Score]:
    """What an episode is worth by the benchmark's rule; one that only a judge can decide counts 0 and is marked so."""

    def score(episode: Episode, task: Task) -> Score:
        result = marked(task, answer_of(episode), benchmark.rule(extractor), {})
        undecided = float(result.mark.value is None)
        return Score(value=result.value, parts={"accuracy": result.value, "undecided": undecided})

    return score


def results_of(benchmark: Benchmark, scored: Sequence[Scored], extractor: Extractor = "official") -> list[Result]:
    """The results of scored episodes, in order."""
    rule = benchmark.rule(extractor)
    return [marked(each.episode.task, answer_of(each.episode), rule, {}) for each in scored]


def reported(
    benchmark: Benchmark, scored: Sequence[Scored], extractor: Extractor, referee: Referee, path: Path
) -> Report:
    """The report of a results file's episodes, written beside it as NAME.report.json; verdicts as NAME.verdicts.jsonl.

    `path` is the results file, NAME.jsonl.
    """
    results = referee.decided(results_of(benchmark, scored, extractor), path.with_suffix(".verdicts.jsonl"))
    found = report(benchmark, results, extractor=extractor, judge=referee.model)
    write_text(path.with_suffix(".report.json"), json.dumps(asdict(found), indent=1) + "\n")
    return found
