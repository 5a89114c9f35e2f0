"""Read lmms-eval's sample logs (`--log_samples`), grade them by Saccade's benchmark rules, and write such logs.

A sample is a line, unchanged: a JSON object with `doc_id` (the row's index in its split), `target`, `input`,
`input_media` (paths and URLs such as `data:image/png;base64,…`; omitted if empty), `filtered_resps` (the graded text),
`resps` (the full reply; omitted if identical), `token_counts`, `doc_hash`, and the task's own metrics. Lines of older
versions also have `doc` and `arguments`. lmms-eval itself is not needed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from saccade.data.option_shuffle import SHUFFLE_KEY
from saccade.errors import DataError
from saccade.evaluation.benchmarks.answer_extraction import extract_final_answer
from saccade.evaluation.benchmarks.base import Answer, GradedAnswer
from saccade.types import AnswerType, Task
from saccade.utils.files import convert_file_errors
from saccade.utils.jsonl import read_jsonl, to_jsonable, write_jsonl

Sample = Mapping[str, Any]


def read_samples(path: Path) -> list[Sample]:
    """Return every line of a log but a truncated last one. Raises DataError for a line that is not from such a log."""
    samples: list[Sample] = [*read_jsonl(path, dict[str, Any], skip_truncated_line=True)]
    for number, sample in enumerate(samples, start=1):
        source, row = f"{path}, sample {number}", sample.get("doc_id")
        if isinstance(row, bool) or not str(row).isdecimal():
            raise DataError(
                f"{source}: doc_id={row!r} is not the index of a row; give a log of --log_samples",
                key="doc_id",
                value=row,
            )
        if "filtered_resps" not in sample and "resps" not in sample:
            raise DataError(
                f"{source}: 'filtered_resps' and 'resps' are both missing; give a log of --log_samples",
                key="filtered_resps",
            )
    return samples


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write a log atomically. Raises RunError if that fails."""
    with convert_file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, samples)


def build_answers(samples: Sequence[Sample], tasks: Sequence[Task]) -> dict[str, Answer]:
    """Return a log's answers to a benchmark's tasks, by task id: the sample with `doc_id` i answers task i.

    The local copy must have the order of lmms-eval's split, with one task per row; of several samples of one row the
    first counts. Raises DataError if a sample has no row, or its ground-truth letter differs from the task's.
    """
    answers: dict[str, Answer] = {}
    for sample in samples:
        row, letter = int(sample["doc_id"]), str(sample.get("target", "")).strip()
        if row >= len(tasks):
            raise DataError(
                f"the log has an answer to row {row}, but the last row of the copy is {len(tasks) - 1}; "
                "use the copy of the split that was evaluated",
                key="doc_id",
                value=row,
            )
        task = tasks[row]
        # Compare letters only: the format of free answers and spans differs between versions.
        if task.answer_type == AnswerType.CHOICE and len(letter) == 1 and letter != task.ground_truth:
            raise DataError(
                f"the ground truth of row {row} is {letter} in the log and {task.ground_truth} in the copy "
                f"({task.id}): they are of different splits or orders; use the copy of the split that was evaluated",
                key="target",
                value=letter,
            )
        answers.setdefault(task.id, Answer(text=extract_reply(sample), error=sample.get("error")))
    return answers


def extract_reply(sample: Sample) -> str:
    """Return the model's first reply, else the graded text, which a log without replies has."""
    return next(_flatten_texts(sample["resps"] if "resps" in sample else sample.get("filtered_resps")), "")


def _flatten_texts(value: Any) -> Iterator[str]:
    """Yield the texts of nested lists; None yields nothing."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_texts(item)
    elif value is not None:
        yield str(value)


def build_samples(results: Sequence[GradedAnswer], tasks: Sequence[Task]) -> list[Sample]:
    """Return Saccade's results as samples of such a log; `tasks` are all of the copy, in the order of its rows.

    `score` is the value of the grading rule; a failed episode has 0 and its reason as `error`. Raises DataError for a
    task that is not in `tasks`, and for shuffled options: a log has the published letters.
    """
    rows = {task.id: row for row, task in enumerate(tasks)}
    samples: list[Sample] = []
    for result in results:
        task, response = result.task, result.answer.text
        if task.id not in rows:
            raise DataError(
                f"the copy of the benchmark has no question {task.id}; give the copy that was evaluated",
                key="tasks",
                value=task.id,
            )
        if SHUFFLE_KEY in task.extras:
            raise DataError(
                f"the options of {task.id} are shuffled, but a log has the published order; "
                "evaluate with evaluation.shuffle_options=false",
                key="evaluation.shuffle_options",
                value=True,
            )
        final_answer = extract_final_answer(response)
        doc = json.dumps(to_jsonable(task), indent=2, ensure_ascii=False)
        samples.append(
            {
                "doc_id": rows[task.id],
                "target": str(task.ground_truth),
                **({} if final_answer == response else {"resps": [response]}),
                "filtered_resps": final_answer,
                "token_counts": [None],
                "doc_hash": sha256(doc.encode("utf-8", "replace")).hexdigest(),
                "score": result.value,
                **({} if result.answer.error is None else {"error": result.answer.error}),
                "input": task.question,
                **({"input_media": [media.path for media in task.media]} if task.media else {}),
            }
        )
    return samples
