"""What a judge said of answers that no rule decides, kept beside an evaluation's results and read with them.

evaluations/mmvu.jsonl            the results, by the rule: what only a judge can say is marked `undecided` and counts 0
evaluations/mmvu.verdicts.jsonl   what a judge said of those, by task and answer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.data.record import read_jsonl
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import Result
from saccade.evaluation.benchmarks._episodes import answer_of
from saccade.evaluation.metrics import undecided
from saccade.evaluation.run import read_results
from saccade.types import Score, Scored

VERDICTS = ".verdicts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge said of an answer to a task: a value in [0, 1], or None and the reason why it said nothing.

    >>> Verdict(task="validation_7", answer="a dolly zoom", value=1.0).reason
    ''
    """

    task: str
    answer: str
    value: float | None
    reason: str = ""


def read_verdicts(results: Path) -> list[Verdict]:
    """Those beside a results file; [] where no judge was asked. Raises DataError where they can't be read."""
    path = results.with_suffix(VERDICTS)
    return read_jsonl(path, Verdict) if path.exists() else []


def judged(scored: Sequence[Scored], verdicts: Sequence[Verdict]) -> list[Scored]:
    """The episodes in order, each undecided one with the score that a verdict on its answer gives it, if there is one.

    What a rule decided is never overruled.
    """
    said = _values(verdicts)
    return [_ruled(each, said) for each in scored] if said else list(scored)


def decided(results: Sequence[Result], verdicts: Sequence[Verdict]) -> list[Result]:
    """The results in order, each open one with the verdict on its answer, if there is one."""
    said = _values(verdicts)
    found = []
    for each in results:
        value = said.get((each.task.id, final_answer(each.answer.text))) if each.open else None
        found.append(each if value is None else replace(each, mark=replace(each.mark, value=value)))
    return found


def _values(verdicts: Sequence[Verdict]) -> dict[tuple[str, str], float]:
    return {(each.task, each.answer): each.value for each in verdicts if each.value is not None}


def _ruled(each: Scored, said: Mapping[tuple[str, str], float]) -> Scored:
    if not undecided(each):
        return each
    value = said.get((each.episode.task.id, final_answer(answer_of(each.episode).text)))
    if value is None:
        return each
    parts = {**each.score.parts, "accuracy": value, "undecided": 0.0}
    return Scored(episode=each.episode, score=Score(value=value, parts=parts))


def read_judged(results: Path) -> list[Scored]:
    """The scored episodes of a results file, with the verdicts that are kept beside it."""
    return judged(read_results(results), read_verdicts(results))


def results_files(folder: Path) -> list[Path]:
    """The results files of a run, those of shards not among them."""
    return [path for path in (folder / "evaluations").glob("*.jsonl") if not path.name.endswith(VERDICTS)]
