"""Benchmarks over the rollout path: an episode's answer, its score, and the report of a results file.

score = scorer(benchmark, "official")      what `evaluation.run.evaluate` is given
results = results_of(benchmark, scored)    its episodes marked again: a rule that was mended needs no new episodes
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from saccade.evaluation.benchmarks._benchmark import (
    Answer,
    Benchmark,
    Extractor,
    Result,
    marked,
)
from saccade.evaluation.metrics import failed
from saccade.types import Episode, Score, Scored, Task


def answer_of(episode: Episode) -> Answer:
    """All that the main agent said in its last turn; an error where the episode broke or nothing was said.

    An answer that stands in no tag, as other systems' protocols have it, is all that counts.
    """
    if failed(episode):
        return Answer(text="", error=episode.error or f"the episode ended as {episode.end}")
    # The last turn alone: what was thought out loud before a call is no answer.
    said = episode.turns[-1].reply if episode.turns else None
    text = said.text if said else ""
    if said and said.answer is not None and "<answer>" not in text:
        text = said.answer
    return Answer(text=text) if text.strip() else Answer(text="", error="the answer is blank")


def scorer(benchmark: Benchmark, extractor: Extractor) -> Callable[[Episode, Task], Score]:
    """What an episode is worth by the benchmark's rule; one that only a judge can decide counts 0 and is marked so."""

    def score(episode: Episode, task: Task) -> Score:
        result = marked(task, answer_of(episode), benchmark.rule(extractor))
        undecided = float(result.mark.value is None)
        return Score(value=result.value, parts={"accuracy": result.value, "undecided": undecided})

    return score


def results_of(benchmark: Benchmark, scored: Sequence[Scored], extractor: Extractor = "official") -> list[Result]:
    """The results of scored episodes, in order; those of one task are its attempts."""
    rule, seen = benchmark.rule(extractor), Counter[str]()
    found = []
    for each in scored:
        task = each.episode.task
        result = marked(task, answer_of(each.episode), rule)
        found.append(replace(result, attempt=seen[task.id]))
        seen[task.id] += 1
    return found
