"""lmms-eval's logs of single samples (`--log_samples`): read, marked by our benchmarks' rules, and written.

    samples = read_samples(Path("logs/model/20260801_120000_samples_videomme.jsonl"))
    results = grade(benchmark, tasks, answers_of(samples, tasks))      their answers under our rules
    write_samples(Path("20260801_120000_samples_videomme.jsonl"), samples_of(results, tasks))

A line is a JSON object with `doc_id` (the row's place in its split), `target`, `input`, `input_media` (paths, and
addresses such as `data:image/png;base64,…`; left out where there are none), `filtered_resps` (what was marked), `resps`
(what was said; left out where it is the same), `token_counts`, `doc_hash`, and the task's own metrics. Lines of older
versions hold `doc` and `arguments` besides. lmms-eval itself is not needed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from saccade.data.record import iterate_jsonl, plain, write_jsonl
from saccade.errors import DataError
from saccade.evaluation.benchmarks._answers import final_answer
from saccade.evaluation.benchmarks._benchmark import Answer, Result
from saccade.evaluation.options import SHUFFLED
from saccade.runlog import writing
from saccade.types import Kind, Task

ABOUT = frozenset({"doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps"})
ABOUT |= {"token_counts", "doc_hash", "error"}  # the last is our own


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSample:
    """A line of a log, kept as it is; everything else is read from it.

    >>> LoggedSample(line={"doc_id": 3, "target": "B", "filtered_resps": "B", "acc": 1.0}).metrics
    {'acc': 1.0}
    """

    line: Mapping[str, Any]

    @property
    def doc_id(self) -> int:
        """The place of the row in its split, from 0."""
        return int(self.line["doc_id"])

    @property
    def target(self) -> str:
        """The gold answer as the task has it."""
        return str(self.line.get("target", ""))

    @property
    def filtered(self) -> tuple[str, ...]:
        """What was marked: one text, or one for each request of a question with several."""
        return tuple(_leaves(self.line.get("filtered_resps")))

    @property
    def responses(self) -> tuple[str, ...]:
        """What the model said, in order; where the log leaves that out, it is what was marked."""
        return tuple(_leaves(self.line["resps"])) if "resps" in self.line else self.filtered

    @property
    def media(self) -> tuple[str, ...]:
        """What the question showed, as far as the log tells: paths and addresses, `data:` ones with all content.

        lmms-eval logs four pictures at most, and no video.
        """
        return tuple(_leaves(self.line.get("input_media")))

    @property
    def metrics(self) -> dict[str, Any]:
        """What the task made of it, by name."""
        return {name: value for name, value in self.line.items() if name not in ABOUT}


def _leaves(value: Any) -> Iterator[str]:
    """The texts of lists in lists; None holds none."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield str(value)


def read_samples(path: Path) -> list[LoggedSample]:
    """Every line of a log; a last one that a kill tore is passed over.

    Raises DataError, naming file, line and field, for what is no line of such a log.
    """
    return list(_checked(path))


def _checked(path: Path) -> Iterator[LoggedSample]:
    for place, line in enumerate(iterate_jsonl(path, dict[str, Any], torn_end=True), start=1):
        where = f"{path}, sample {place}"
        if isinstance(line.get("doc_id"), bool) or not str(line.get("doc_id")).isdecimal():
            raise DataError(f"{where}: 'doc_id' must be the place of a row, it is {line.get('doc_id')!r}")
        if "filtered_resps" not in line and "resps" not in line:
            raise DataError(f"{where}: it holds neither 'filtered_resps' nor 'resps'; is this a log of --log_samples?")
        yield LoggedSample(line=line)


def write_samples(path: Path, samples: Iterable[LoggedSample]) -> None:
    """Write a log, whole or not at all; RunError where that fails."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, (each.line for each in samples))


# ---- with benchmarks -----------------------------------------------------------------------------------------------


def answers_of(samples: Sequence[LoggedSample], tasks: Sequence[Task]) -> dict[str, Answer]:
    """What a log answers to a benchmark's tasks, by their ids: the sample `doc_id` to the task of that row.

    It needs a copy in the order of lmms-eval's split, each row of which makes one task; of several samples of one row
    the first counts. DataError where a sample has no row, or another letter for its gold answer than the task.
    """
    found: dict[str, Answer] = {}
    for each in samples:
        if each.doc_id >= len(tasks):
            raise DataError(f"the log answers row {each.doc_id}, and the copy ends with row {len(tasks) - 1}")
        task = tasks[each.doc_id]
        letter = each.target.strip()
        # Letters alone: what free answers and spans look like differs from version to version.
        if task.kind is Kind.CHOICE and len(letter) == 1 and letter != task.gold:
            raise DataError(
                f"the log says that row {each.doc_id} is answered by {letter}, the copy says {task.gold} ({task.id}): "
                "they are of different splits, or in a different order"
            )
        found.setdefault(task.id, Answer(text=next(iter(each.responses), ""), error=each.line.get("error")))
    return found


def samples_of(results: Sequence[Result], tasks: Sequence[Task], *, metric: str = "score") -> list[LoggedSample]:
    """Our results as such a log has them; `tasks` are all of the copy, whose order gives the rows.

    `metric` names what the rule gave; what broke has 0 and says why as `error`. DataError for a task of no row, and for
    one whose options were shuffled: a row has its published letters.
    """
    rows = {task.id: row for row, task in enumerate(tasks)}
    for each in results:
        if each.task.id not in rows:
            raise DataError(f"the benchmark's copy has no question {each.task.id}; give the copy that was answered")
        if SHUFFLED in each.task.extras:
            raise DataError(f"the options of {each.task.id} were shuffled; a log holds answers in the published order")
    return [_sample(rows[each.task.id], each, metric) for each in results]


def _sample(row: int, result: Result, metric: str) -> LoggedSample:
    task, said = result.task, result.answer.text
    read = final_answer(said)
    doc = json.dumps(plain(task), indent=2, ensure_ascii=False)
    line = {
        "doc_id": row,
        "target": str(task.gold),
        **({} if read == said else {"resps": [said]}),
        "filtered_resps": read,
        "token_counts": [None],
        "doc_hash": sha256(doc.encode("utf-8", "replace")).hexdigest(),
        metric: result.value,
        **({} if result.answer.error is None else {"error": result.answer.error}),
        "input": task.question,
        **({"input_media": [one.path for one in task.media]} if task.media else {}),
    }
    return LoggedSample(line=line)
