"""What a judge said of answers that no rule decides, kept beside an evaluation's results and read with them.

evaluations/mmvu.jsonl            the results, by the rule: what only a judge can say is marked `undecided` and counts 0
evaluations/mmvu.verdicts.jsonl   what a judge said of those, by task and answer
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.data.record import read_jsonl
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Mark, Result, Rule
from saccade.evaluation.benchmarks._episodes import answer_of
from saccade.evaluation.metrics import undecided
from saccade.evaluation.run import read_results
from saccade.types import Score, Scored

VERDICTS = ".verdicts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge said of an answer to a task: a value in [0, 1], or None and the reason why it said nothing.

    `read` is what it read in the answer, where it was asked to ("": no answer). With `instead` it read what a rule
    could have: then what it read counts in the place of the answer.

    >>> Verdict(task="validation_7", answer="a dolly zoom", value=1.0).reason
    ''
    """

    task: str
    answer: str
    value: float | None
    reason: str = ""
    read: str | None = None
    instead: bool = False


def read_verdicts(results: Path) -> list[Verdict]:
    """Those beside a results file; [] where no judge was asked. Raises DataError where they can't be read."""
    path = results.with_suffix(VERDICTS)
    return read_jsonl(path, Verdict) if path.exists() else []


def judged(scored: Sequence[Scored], verdicts: Sequence[Verdict]) -> list[Scored]:
    """The episodes in order, each undecided one with the score that a verdict on its answer gives it, if there is one.

    What a rule decided is never overruled, but for what was read instead.
    """
    said = _by_answer(verdicts)
    found = []
    for each in scored:
        verdict = said.get((each.episode.task.id, final_answer(answer_of(each.episode).text))) if said else None
        found.append(_scored(each, verdict) if verdict and (undecided(each) or verdict.instead) else each)
    return found


def decided(results: Sequence[Result], verdicts: Sequence[Verdict], rule: Rule) -> list[Result]:
    """The results in order, each open one with the verdict on its answer, if there is one; `rule` marks what was read
    instead.
    """
    said = _by_answer(verdicts)
    found = []
    for each in results:
        verdict = said.get((each.task.id, final_answer(each.answer.text))) if each.answer.error is None else None
        rules = verdict is not None and (each.open or verdict.instead)
        found.append(replace(each, mark=_mark(each, verdict, rule)) if rules and verdict else each)
    return found


def _by_answer(verdicts: Sequence[Verdict]) -> dict[tuple[str, str], Verdict]:
    return {(each.task, each.answer): each for each in verdicts}


def _mark(result: Result, verdict: Verdict, rule: Rule) -> Mark:
    if verdict.instead and verdict.read is not None:
        return rule(verdict.read, result.task) if verdict.read else UNPARSED
    read = result.mark.read if verdict.read is None else verdict.read or None
    return Mark(read=read, value=verdict.value)


def _scored(each: Scored, verdict: Verdict) -> Scored:
    value = verdict.value or 0.0
    parts = {**each.score.parts, "accuracy": value, "undecided": float(verdict.value is None)}
    return Scored(episode=each.episode, score=Score(value=value, parts=parts))


def read_judged(results: Path) -> list[Scored]:
    """The scored episodes of a results file, with the verdicts that are kept beside it."""
    return judged(read_results(results), read_verdicts(results))


def results_files(folder: Path) -> list[Path]:
    """The results files of a run, those of shards not among them."""
    return [path for path in (folder / "evaluations").glob("*.jsonl") if not path.name.endswith(VERDICTS)]
