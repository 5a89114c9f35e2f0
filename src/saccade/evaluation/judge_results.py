"""Store judge verdicts on answers that no rule decides, next to an evaluation's results.

evaluations/mmvu.jsonl            the results by the rule; answers that need a judge are `undecided` and score 0
evaluations/mmvu.verdicts.jsonl   the judge's verdicts on those, by task and answer
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.config.schema import STAGES
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import UNPARSED, Answer, Grade, GradedAnswer, GradeFn, extract_answer
from saccade.metrics.episode_metrics import is_undecided
from saccade.types import Score, ScoredEpisode, Task
from saccade.utils.files import open_file
from saccade.utils.jsonl import parse_plain_json, read_jsonl

VERDICTS_SUFFIX = ".verdicts.jsonl"
_CHECKPOINT = re.compile(r"(?<![a-z])(?P<stage>sft|rl)(?![a-z])(?:[/_]step-(?P<step>[0-9]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerdict:
    """Record a judge's verdict on an answer to a task: a value in [0, 1], or None and the reason why there is none.

    `extracted` is the answer that the judge extracted, if its prompt requests one ("": no answer). With
    `overrides_rule` the judge extracted an answer that a rule could have read; the extracted answer then replaces the
    response.
    """

    task_id: str
    answer: str
    value: float | None
    reason: str = ""
    extracted: str | None = None
    overrides_rule: bool = False
    request_digest: str = ""  # of the judge's settings and of what it was asked


def list_results_files(run_folder: Path) -> list[Path]:
    """Return the results files of a run's evaluations, without verdicts, in order of what they evaluated.

    Weights from outside of the run come first, then checkpoints of SFT and of RL by step; of equal ones the name
    decides. File times have no part in it, so a copied run has the same order.
    """
    paths = (run_folder / "evaluations").glob("*.jsonl")
    return sorted((path for path in paths if not path.name.endswith(VERDICTS_SUFFIX)), key=_get_position)


def _get_position(path: Path) -> tuple[int, float, str]:
    with contextlib.suppress(OSError):
        status = path.stat()
        return (*_locate_checkpoint(path, status.st_mtime_ns, status.st_size), path.name)
    return (0, 0, path.name)  # deleted since it was listed


@functools.lru_cache(maxsize=4096)  # the viewer lists its runs every few seconds
def _locate_checkpoint(path: Path, modified_ns: int, size: int) -> tuple[int, float]:
    """Return the number of the stage, 0 for other weights, and the step of the checkpoint of a results file."""
    recorded = None
    with contextlib.suppress(OSError, ValueError, RecursionError), open_file(path) as file:
        record = parse_plain_json(file.readline())
        recorded = record.get("checkpoint") if isinstance(record, dict) else None
    # Files of earlier versions don't record it: their names do, where Saccade chose them.
    match = _CHECKPOINT.search(recorded if isinstance(recorded, str) else path.stem)
    if match is None:
        return 0, 0
    return STAGES.index(match["stage"]) + 1, int(match["step"]) if match["step"] else math.inf


def read_verdicts(results: Path) -> list[JudgeVerdict]:
    """Return the verdicts next to a results file; [] without a judge. Raises DataError if the file is invalid."""
    path = results.with_suffix(VERDICTS_SUFFIX)
    return read_jsonl(path, JudgeVerdict) if path.exists() else []


def apply_verdicts(scored: Sequence[ScoredEpisode], verdicts: Sequence[JudgeVerdict]) -> list[ScoredEpisode]:
    """Return the episodes in order, with the scores of the verdicts on their answers (see `_index_by_answer`)."""
    find_verdict, judged = _index_by_answer(verdicts), []
    for outcome in scored:
        episode, score = outcome.episode, outcome.score
        verdict = find_verdict(episode.task, extract_answer(episode), is_undecided(outcome)) if verdicts else None
        if verdict is not None:
            value, undecided = verdict.value or 0.0, float(verdict.value is None)
            score = Score(value=value, parts={**score.parts, "undecided": undecided}, correct=value)
        judged.append(ScoredEpisode(episode=episode, score=score))
    return judged


def apply_verdicts_to_answers(
    results: Sequence[GradedAnswer], verdicts: Sequence[JudgeVerdict], grade_fn: GradeFn
) -> list[GradedAnswer]:
    """Return the results in order, with the verdicts on them; `grade_fn` grades what a judge extracted."""
    find_verdict, judged = _index_by_answer(verdicts), []
    for result in results:
        verdict = find_verdict(result.task, result.answer, result.is_undecided)
        judged.append(replace(result, grade=_resolve_grade(result, verdict, grade_fn)) if verdict else result)
    return judged


def _index_by_answer(verdicts: Sequence[JudgeVerdict]) -> Callable[[Task, Answer, bool], JudgeVerdict | None]:
    """Return a function that finds the verdict that applies to a task's answer, which a rule left undecided or not."""
    by_answer = {(verdict.task_id, verdict.answer): verdict for verdict in verdicts}

    def find_verdict(task: Task, answer: Answer, is_undecided: bool) -> JudgeVerdict | None:
        verdict = by_answer.get((task.id, extract_final_answer(answer.text))) if answer.error is None else None
        return verdict if verdict is not None and (is_undecided or verdict.overrides_rule) else None

    return find_verdict


def _resolve_grade(result: GradedAnswer, verdict: JudgeVerdict, grade_fn: GradeFn) -> Grade:
    if verdict.overrides_rule and verdict.extracted is not None:
        return grade_fn(verdict.extracted, result.task) if verdict.extracted else UNPARSED
    extracted = result.grade.extracted if verdict.extracted is None else verdict.extracted or None
    return Grade(extracted=extracted, value=verdict.value)
