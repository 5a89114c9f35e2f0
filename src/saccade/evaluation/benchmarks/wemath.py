"""We-Math, testmini: problems together with the steps that they are made of."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from saccade.data.raw import Row
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Benchmark, Mark, Result, accuracy, extra, table
from saccade.evaluation.benchmarks._rows import Copy
from saccade.evaluation.benchmarks._rules import choice_mark, tolerant_choice, unlabelled
from saccade.types import Kind, Task

_KEYS = {"2steps_1", "2steps_2", "2steps_multi", "3steps_1", "3steps_2", "3steps_3", "3steps_multi"}
_STEPS = {"2steps_multi": "two-step", "3steps_multi": "three-step"}
COUNTS = {"one-step": 1215, "two-step": 360, "three-step": 165}


def wemath() -> Benchmark:
    """We-Math (Qiao et al. 2024, arXiv 2407.01284), 1,740 rows of 525 problems; `score_strict` is the number quoted.

    Official: what follows the last `Answer`, without `<`, `>`, `:` and full stops, must begin with one of A-H. A
    problem is of insufficient knowledge (a step and the whole wrong), inadequate generalisation (the steps right, the
    whole wrong), complete mastery (all right) or rote memorisation (a step wrong, the whole right); the loose setting
    asks for one right step where the strict one asks for all. Score = 1 - (IG / 2 + RM + IK) / problems.
    """
    return Benchmark(
        name="wemath",
        hub="We-Math/We-Math",
        patterns=("testmini.json", "data/testmini.json", "data/testmini-*.parquet", "*.jsonl"),
        count=1740,
        read=_read,
        official=_official,
        tolerant=tolerant_choice,
        headline="score_strict",
        metrics=_metrics,
        strata={
            "steps": lambda task: str(task.extras["steps"]),
            "concept": lambda task: str(task.extras["concept"]) if task.extras["steps"] == "one-step" else None,
        },
        counts={"steps": COUNTS},
        unit=extra("problem"),
        together=extra("problem"),
    )


def _official(text: str, task: Task) -> Mark:
    plain = re.sub("[><:.]", "", text.split("Answer")[-1].strip()).strip()
    return choice_mark(plain[0], task) if plain and plain[0] in "ABCDEFGH" else UNPARSED


def _metrics(results: Sequence[Result]) -> dict[str, float]:
    """Percentages over the problems that are there with their whole; the rates of rote memorisation over CM + RM."""
    steps: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    wholes: dict[tuple[str, int], tuple[bool, float]] = {}
    for each in results:
        problem, right = (each.task.extras["problem"], each.attempt), each.value >= 1
        if each.task.extras["steps"] == "one-step":
            steps[problem].append(right)
        else:
            wholes[problem] = right, each.weight
    known = [((all(steps[problem]), any(steps[problem])), *whole) for problem, whole in wholes.items()]
    problems = sum(times for *_, times in known)
    count = problems or 1
    ik = sum(times for (every, _), whole, times in known if not every and not whole)
    ig = sum(times for (every, _), whole, times in known if every and not whole)
    found: dict[str, float] = {}
    for place, setting in enumerate(("strict", "loose")):
        cm = sum(times for right, whole, times in known if whole and right[place])
        rm = sum(times for right, whole, times in known if whole and not right[place])
        found[f"score_{setting}"] = 100 * (problems - 0.5 * ig - rm - ik) / count
        found[f"complete_mastery_{setting}"] = 100 * cm / count
        found[f"rote_memorisation_{setting}"] = 100 * rm / (cm + rm) if cm + rm else 0.0
    rates = {"insufficient_knowledge": 100 * ik / count, "inadequate_generalisation": 100 * ig / count}
    by = {name: cell.value for name, cell in table(results, lambda task: str(task.extras["steps"])).items()}
    return {**found, **rates, **by, **accuracy(results)}


def _read(row: Row, copy: Copy) -> Iterator[Task]:
    key, problem = row.text("key"), row.text("ID")
    if key not in _KEYS:
        raise row.wrong("key", f"it should be one of {', '.join(sorted(_KEYS))}; not {key!r}")
    # one text holds them all: `A. 300;B. 400; C. ...`
    options = unlabelled([each.strip() for each in re.split(r";\s*(?=[B-H]\.)", row.text("option"))])
    yield Task(
        id=f"{problem}-{key}",
        question=row.text("question"),
        media=(copy.picture(row.get("image_path", "image")),),
        kind=Kind.CHOICE,
        gold=row.letter(len(options), "answer"),
        choices=options,
        extras={
            **{"problem": problem, "key": key, "steps": _STEPS.get(key, "one-step")},
            "concept": row.label("knowledge concept"),
        },
    )
