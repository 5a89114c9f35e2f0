"""Read lmms-eval's sample logs (`--log_samples`), grade them by Saccade's benchmark rules, and write such logs.

    samples = read_samples(Path("logs/model/20260801_120000_samples_videomme.jsonl"))
    results = grade(benchmark, tasks, build_answers(samples, tasks))      their answers under our rules
    write_samples(Path("20260801_120000_samples_videomme.jsonl"), build_samples(results, tasks))

A line is a JSON object with `doc_id` (the row's index in its split), `target`, `input`, `input_media` (paths and URLs
such as `data:image/png;base64,…`; omitted if empty), `filtered_resps` (the graded text), `resps` (the full reply;
omitted if identical), `token_counts`, `doc_hash`, and the task's own metrics. Lines of older versions also have `doc`
and `arguments`. lmms-eval itself is not needed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from saccade.data.option_shuffle import SHUFFLE_KEY
from saccade.errors import DataError
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import Answer, GradedAnswer
from saccade.types import AnswerType, Task
from saccade.utils.files import file_errors
from saccade.utils.jsonl import iterate_jsonl, to_jsonable, write_jsonl

NON_METRIC_KEYS = frozenset({"doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps"})
NON_METRIC_KEYS |= {"token_counts", "doc_hash", "error"}  # `error` is written by Saccade only


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """Wrap a line of a log, unchanged; the properties read from it.

    >>> LoggedSample(line={"doc_id": 3, "target": "B", "filtered_resps": "B", "acc": 1.0}).metrics
    {'acc': 1.0}
    """

    line: Mapping[str, Any]

    @property
    def doc_id(self) -> int:
        """Return the index of the row in its split, from 0."""
        return int(self.line["doc_id"])

    @property
    def target(self) -> str:
        """Return the ground truth as the task has it."""
        return str(self.line.get("target", ""))

    @property
    def filtered_responses(self) -> tuple[str, ...]:
        """Return the graded texts: one, or one per request of a question with several."""
        return tuple(_flatten_texts(self.line.get("filtered_resps")))

    @property
    def responses(self) -> tuple[str, ...]:
        """Return the model's replies, in order; the graded texts if the log omits them."""
        return tuple(_flatten_texts(self.line["resps"])) if "resps" in self.line else self.filtered_responses

    @property
    def media(self) -> tuple[str, ...]:
        """Return the media of the question as far as the log has them: paths and URLs, `data:` URLs with full content.

        lmms-eval logs at most four images and no video.
        """
        return tuple(_flatten_texts(self.line.get("input_media")))

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the task's own metrics by name."""
        return {name: value for name, value in self.line.items() if name not in NON_METRIC_KEYS}


def _flatten_texts(value: Any) -> Iterator[str]:
    """Yield the texts of nested lists; None yields nothing."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_texts(item)
    elif value is not None:
        yield str(value)


def read_samples(path: Path) -> list[LoggedSample]:
    """Return every line of a log; skip a truncated last line.

    Raises DataError, naming file, line and field, if a line is not from such a log.
    """
    return list(_iterate_samples(path))


def _iterate_samples(path: Path) -> Iterator[LoggedSample]:
    for number, line in enumerate(iterate_jsonl(path, dict[str, Any], skip_truncated_line=True), start=1):
        source = f"{path}, sample {number}"
        if isinstance(line.get("doc_id"), bool) or not str(line.get("doc_id")).isdecimal():
            raise DataError(
                f"{source}: doc_id={line.get('doc_id')!r} is not the index of a row; give a log of --log_samples",
                key="doc_id",
                value=line.get("doc_id"),
            )
        if "filtered_resps" not in line and "resps" not in line:
            raise DataError(
                f"{source}: 'filtered_resps' and 'resps' are both missing; give a log of --log_samples",
                key="filtered_resps",
            )
        yield LoggedSample(line=line)


def write_samples(path: Path, samples: Iterable[LoggedSample]) -> None:
    """Write a log atomically. Raises RunError if that fails."""
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, (sample.line for sample in samples))


# ---- with benchmarks -----------------------------------------------------------------------------------------------


def build_answers(samples: Sequence[LoggedSample], tasks: Sequence[Task]) -> dict[str, Answer]:
    """Return a log's answers to a benchmark's tasks, by task id: the sample with `doc_id` i answers task i.

    The local copy must have the order of lmms-eval's split, with one task per row; of several samples of one row the
    first counts. Raises DataError if a sample has no row, or its ground-truth letter differs from the task's.
    """
    answers: dict[str, Answer] = {}
    for sample in samples:
        if sample.doc_id >= len(tasks):
            raise DataError(
                f"the log has an answer to row {sample.doc_id}, but the last row of the copy is {len(tasks) - 1}; "
                "use the copy of the split that was evaluated",
                key="doc_id",
                value=sample.doc_id,
            )
        task = tasks[sample.doc_id]
        letter = sample.target.strip()
        # Compare letters only: the format of free answers and spans differs between versions.
        if task.answer_type == AnswerType.CHOICE and len(letter) == 1 and letter != task.ground_truth:
            raise DataError(
                f"the ground truth of row {sample.doc_id} is {letter} in the log and {task.ground_truth} in the copy "
                f"({task.id}): they are of different splits or orders; use the copy of the split that was evaluated",
                key="target",
                value=letter,
            )
        answers.setdefault(task.id, Answer(text=next(iter(sample.responses), ""), error=sample.line.get("error")))
    return answers


def build_samples(
    results: Sequence[GradedAnswer], tasks: Sequence[Task], *, metric: str = "score"
) -> list[LoggedSample]:
    """Return Saccade's results as samples of such a log; `tasks` are all of the copy, whose order gives the row
    indices.

    `metric` names the value of the grading rule; a failed episode has 0 and its reason as `error`. Raises DataError for
    a task that is not in `tasks`, and for shuffled options: a log has the published letters.
    """
    rows = {task.id: row for row, task in enumerate(tasks)}
    for result in results:
        if result.task.id not in rows:
            raise DataError(
                f"the copy of the benchmark has no question {result.task.id}; give the copy that was evaluated",
                key="tasks",
                value=result.task.id,
            )
        if SHUFFLE_KEY in result.task.extras:
            raise DataError(
                f"the options of {result.task.id} are shuffled, but a log has the published order; "
                "evaluate with evaluation.shuffle_options=false",
                key="evaluation.shuffle_options",
                value=True,
            )
    return [_build_sample(rows[result.task.id], result, metric) for result in results]


def _build_sample(row: int, result: GradedAnswer, metric: str) -> LoggedSample:
    task, response = result.task, result.answer.text
    final_answer = extract_final_answer(response)
    doc = json.dumps(to_jsonable(task), indent=2, ensure_ascii=False)
    line = {
        "doc_id": row,
        "target": str(task.ground_truth),
        **({} if final_answer == response else {"resps": [response]}),
        "filtered_resps": final_answer,
        "token_counts": [None],
        "doc_hash": sha256(doc.encode("utf-8", "replace")).hexdigest(),
        metric: result.value,
        **({} if result.answer.error is None else {"error": result.answer.error}),
        "input": task.question,
        **({"input_media": [media.path for media in task.media]} if task.media else {}),
    }
    return LoggedSample(line=line)
