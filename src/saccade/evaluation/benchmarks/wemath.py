"""We-Math, testmini: problems together with the steps that they consist of."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from saccade.evaluation.benchmarks.answer_extraction import strip_option_labels
from saccade.evaluation.benchmarks.base import (
    UNPARSED,
    Benchmark,
    Grade,
    GradedAnswer,
    compute_accuracy,
    grade_choice,
    group_by_extra,
    tabulate,
)
from saccade.evaluation.benchmarks.local_dataset import BenchmarkRow
from saccade.types import AnswerType, Task

_KEYS = ("2steps_1", "2steps_2", "2steps_multi", "3steps_1", "3steps_2", "3steps_3", "3steps_multi")
_NUM_STEPS = {"2steps_multi": "two-step", "3steps_multi": "three-step"}
STEP_COUNTS = {"one-step": 1215, "two-step": 360, "three-step": 165}


def wemath() -> Benchmark:
    """Define We-Math (Qiao et al. 2024, arXiv 2407.01284), 1,740 rows of 525 problems; `score_strict` is mostly quoted.

    Strict: the text after the last `Answer`, without `<`, `>`, `:` and periods, must begin with one of A-H. A problem
    shows insufficient knowledge (a step and the whole wrong), inadequate generalization (the steps right, the whole
    wrong), complete mastery (all right) or rote memorization (a step wrong, the whole right); the loose variant
    requires one right step where the strict one requires all. Score = 1 - (IG / 2 + RM + IK) / problems.
    """
    return Benchmark(
        name="wemath",
        repo_id="We-Math/We-Math",
        file_patterns=("testmini.json", "data/testmini.json", "data/testmini-*.parquet", "*.jsonl"),
        num_tasks=1740,
        parse_row=_parse_row,
        grade_strict=_grade_strict,
        primary_metric="score_strict",
        compute_metrics=_compute_metrics,
        strata={
            "steps": group_by_extra("steps"),
            "concept": lambda task: str(task.extras["concept"]) if task.extras["steps"] == "one-step" else None,
        },
        stratum_sizes={"steps": STEP_COUNTS},
        cluster_key=group_by_extra("problem"),
        joint_key=group_by_extra("problem"),
    )


def _grade_strict(text: str, task: Task) -> Grade:
    plain = re.sub("[><:.]", "", text.split("Answer")[-1].strip()).strip()
    return grade_choice(plain[0], task) if plain and plain[0] in "ABCDEFGH" else UNPARSED


def _compute_metrics(results: Sequence[GradedAnswer]) -> dict[str, float]:
    """Return percentages over problems whose final question is present; rote memorization rates are over CM + RM."""
    steps: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    wholes: dict[tuple[str, int], tuple[bool, float]] = {}
    for result in results:
        problem, is_right = (result.task.extras["problem"], result.sample_index), result.value >= 1
        if result.task.extras["steps"] == "one-step":
            steps[problem].append(is_right)
        else:
            wholes[problem] = is_right, result.weight
    # per problem: (all steps right, any step right), whole right, weight
    outcomes = [((all(steps[problem]), any(steps[problem])), *whole) for problem, whole in wholes.items()]
    problems = sum(weight for *_, weight in outcomes)
    count = problems or 1
    ik = sum(weight for (every, _), whole, weight in outcomes if not every and not whole)
    ig = sum(weight for (every, _), whole, weight in outcomes if every and not whole)
    metrics: dict[str, float] = {}
    for index, setting in enumerate(("strict", "loose")):
        cm = sum(weight for right, whole, weight in outcomes if whole and right[index])
        rm = sum(weight for right, whole, weight in outcomes if whole and not right[index])
        metrics[f"score_{setting}"] = 100 * (problems - 0.5 * ig - rm - ik) / count
        metrics[f"complete_mastery_{setting}"] = 100 * cm / count
        metrics[f"rote_memorization_{setting}"] = 100 * rm / (cm + rm) if cm + rm else 0.0
    rates = {"insufficient_knowledge": 100 * ik / count, "inadequate_generalization": 100 * ig / count}
    rows = {label: row.value for label, row in tabulate(results, group_by_extra("steps")).items()}
    return {**metrics, **rates, **rows, **compute_accuracy(results)}


def _parse_row(row: BenchmarkRow) -> Iterator[Task]:
    key, problem = row.get_text("key"), row.get_text("ID")
    row.require_one_of("key", key, _KEYS)
    # One field holds all options: `A. 300;B. 400; C. ...`
    options = strip_option_labels([option.strip() for option in re.split(r";\s*(?=[B-H]\.)", row.get_text("option"))])
    yield Task(
        id=f"{problem}-{key}",
        question=row.get_text("question"),
        media=(row.resolve_image(row.get("image_path", "image")),),
        answer_type=AnswerType.CHOICE,
        ground_truth=row.get_option_letter(len(options), "answer"),
        options=options,
        extras={
            "problem": problem,
            "key": key,
            "steps": _NUM_STEPS.get(key, "one-step"),
            "concept": row.get_text_or_empty("knowledge concept"),
        },
    )
