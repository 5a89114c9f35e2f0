"""Metrics against hand-computed numbers, and fixed denominators."""

import pytest
from error_cases import raises
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.errors import DataError
from saccade.evaluation.benchmark_result import build_plain_result
from saccade.evaluation.benchmarks.base import Answer, grade
from saccade.evaluation.judge_results import JudgeVerdict, apply_verdicts_to_answers


def tasks_of(name, folder, rows=None, **settings):
    benchmark = plugins.resolve("evaluation.benchmarks", name, settings)()
    return benchmark, benchmark.load_tasks(write_copy(name, folder, rows), allow_incomplete=rows is not None)


def report_replies(benchmark, tasks, get_reply, extractor="strict"):
    answers = {task.id: reply if isinstance(reply := get_reply(task), Answer) else Answer(text=reply) for task in tasks}
    return build_plain_result(benchmark, grade(benchmark, tasks, answers, scoring=extractor), scoring=extractor)


@pytest.mark.slow
def test_failures_stay_in_the_denominator(tmp_path):
    benchmark, tasks = tasks_of("videomme", tmp_path)
    broken = {task.id for task in tasks[:300]}
    unread = {task.id for task in tasks[300:600]}

    def get_reply(task):
        if task.id in broken:
            return Answer(text="C", error="the video can't be decoded: C")
        return "no idea" if task.id in unread else "C"

    found = report_replies(benchmark, tasks, get_reply)
    assert (found.num_tasks, found.errors, found.unparsed, found.undecided) == (2700, 300, 300, 0)
    assert found.score == pytest.approx(100 * 2100 / 2700)
    assert found.metrics["accuracy_of_answered"] == 100  # as the published script has it
    assert {name: cell.n for name, cell in found.strata["duration"].items()} == {
        "long": 900,
        "medium": 900,
        "short": 900,
    }
    assert found.strata["duration"]["short"].value == pytest.approx(100 / 3)


def test_a_report_needs_results(tmp_path):
    with raises(DataError, key="mlvu"):
        build_plain_result(plugins.resolve("evaluation.benchmarks", "mlvu", {})(), [])


def test_lvbench_counts_a_question_in_each_capability(tmp_path):
    benchmark, tasks = tasks_of("lvbench", tmp_path)
    found = report_replies(benchmark, tasks, lambda task: "C" if "Sum" in task.extras["capabilities"] else "A")
    assert sum(cell.n for cell in found.strata["capability"].values()) == 2094
    assert found.strata["capability"]["Sum"].value == 100
    assert found.score == pytest.approx(100 * 58 / 1549)


def test_mlvu_averages_tasks(tmp_path):
    benchmark, tasks = tasks_of("mlvu", tmp_path)
    found = report_replies(benchmark, tasks, lambda task: "C" if task.extras["task"] == "plotQA" else "A")
    assert found.score == pytest.approx(100 / 7)
    assert found.metrics["accuracy"] == pytest.approx(100 * 539 / 2175)


def test_charades_recall_is_at_least_the_threshold(tmp_path):
    row = {"line": "V 0.0 10.0##a person sits."}
    benchmark, tasks = tasks_of("charades_sta", tmp_path, [row] * 4)
    spans = dict(zip((task.id for task in tasks), ("0 - 3", "0 - 5", "0 - 7", "20 - 30"), strict=True))
    found = report_replies(benchmark, tasks, lambda task: spans[task.id])
    assert found.metrics == pytest.approx({"r1@0.3": 75, "r1@0.5": 50, "r1@0.7": 25, "miou": 37.5})


@pytest.mark.slow
def test_vsibench_averages_levels_first(tmp_path):
    benchmark, tasks = tasks_of("vsibench", tmp_path)
    easy = "object_rel_direction_easy"
    found = report_replies(benchmark, tasks, lambda task: "C" if task.extras["question_type"] == easy else "none")
    assert found.metrics["object_rel_direction"] == pytest.approx(100 / 3)
    assert found.score == pytest.approx(100 / 3 / 8)
    assert list(found.metrics)[1:3] == ["object_counting", "object_abs_distance"]
    only = [row for row in MAKERS["vsibench"]() if row["question_type"] == easy]
    benchmark, tasks = tasks_of("vsibench", tmp_path / "easy", only)
    assert report_replies(benchmark, tasks, lambda task: "C").score == 100


def test_hrbench_averages_rotations(tmp_path):
    benchmark, tasks = tasks_of("hrbench", tmp_path)
    found = report_replies(benchmark, tasks, lambda task: "A" if task.extras["rotation"] == "0" else task.ground_truth)
    assert found.metrics == pytest.approx({"average": 75, "fsp": 75, "fcp": 75, "mean_of_rows": 75})
    found = report_replies(
        benchmark, tasks, lambda task: task.ground_truth if task.extras["category"] == "single" else "none"
    )
    assert found.metrics == pytest.approx({"average": 50, "fsp": 100, "fcp": 0, "mean_of_rows": 50})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmvu", "mathverse"])
def test_undecided_answers_bound_the_score(name, tmp_path):
    benchmark, tasks = tasks_of(name, tmp_path)
    undecided = [task for task in tasks if task.ground_truth in ("Dolly Zoom", "14")]
    found = report_replies(benchmark, tasks, lambda task: task.ground_truth if task not in undecided else "hm")
    assert found.undecided == len(undecided)
    assert found.score == pytest.approx(100 * (1 - len(undecided) / len(tasks)))
    assert found.upper_bounds[found.primary_metric] == 100
    answers = {task.id: Answer(text=str(task.ground_truth) if task not in undecided else "hm") for task in tasks}
    values = {task.id: float(at % 2) for at, task in enumerate(undecided)}
    verdicts = [JudgeVerdict(task_id=name, answer="hm", value=value) for name, value in values.items()]
    found = build_plain_result(
        benchmark, apply_verdicts_to_answers(grade(benchmark, tasks, answers), verdicts, benchmark.grade_strict)
    )
    assert found.undecided == 0
    assert found.metrics == found.upper_bounds
    right = len(tasks) - len(undecided) + sum(values.values())
    assert found.score == pytest.approx(100 * right / len(tasks))


# problems by (steps right, whole right): one of each kind of two-step problem, and one of three steps
WEMATH = [
    ("2steps_1", (1, 1), 1),  # complete mastery
    ("2steps_2", (1, 0), 1),  # rote if strict, mastery if loose
    ("2steps_3", (0, 0), 1),  # rote
    ("2steps_4", (1, 1), 0),  # inadequate generalization
    ("2steps_5", (1, 0), 0),  # insufficient knowledge
    ("2steps_6", (0, 0), 0),  # insufficient knowledge
    ("3steps_1", (1, 1, 0), 1),  # rote if strict, mastery if loose
    ("3steps_2", (1, 1, 1), 0),  # inadequate generalization
]


def test_wemath_four_dimensions(tmp_path):
    rows, right = [], {}
    for problem, steps, whole in WEMATH:
        count = problem[0]
        for part, value in [*enumerate(steps, start=1), ("multi", whole)]:
            rows.append({"ID": problem, "key": f"{count}steps_{part}", "knowledge concept": "Cones", "question": "?"})
            rows[-1] |= {"option": "A. a;B. b", "answer": "B", "image_path": "1.png"}
            right[f"{problem}-{count}steps_{part}"] = value
    benchmark, tasks = tasks_of("wemath", tmp_path, rows)
    found = report_replies(benchmark, tasks, lambda task: "B" if right[task.id] else "A").metrics
    # of 8: IK 2, IG 2; strict CM 1, RM 3; loose CM 3, RM 1
    assert found["insufficient_knowledge"] == 25
    assert found["inadequate_generalization"] == 25
    assert found["complete_mastery_strict"] == 12.5
    assert found["rote_memorization_strict"] == 75
    assert found["score_strict"] == pytest.approx(100 * (8 - 1 - 3 - 2) / 8)
    assert found["complete_mastery_loose"] == 37.5
    assert found["rote_memorization_loose"] == 25
    assert found["score_loose"] == pytest.approx(100 * (8 - 1 - 1 - 2) / 8)
    assert found["two-step"] == 50


@pytest.mark.slow
def test_dynamath_worst_case_is_over_seeds(tmp_path):
    benchmark, tasks = tasks_of("dynamath", tmp_path)

    def get_reply(task):  # variant 3 of all but the first 100 seeds is wrong
        wrong = task.extras["variant"] == "3" and int(task.extras["seed"]) > 100
        return '{"short answer": "no"}' if wrong else f'{{"short answer": "{task.ground_truth}"}}'

    found = report_replies(benchmark, tasks, get_reply)
    assert found.metrics["average"] == pytest.approx(100 * (5010 - 401) / 5010)
    assert found.metrics["worst_case"] == pytest.approx(100 * 100 / 501)


def test_tirbench_averages_samples(tmp_path):
    benchmark, tasks = tasks_of("tirbench", tmp_path)
    found = report_replies(benchmark, tasks, lambda task: "4 3 1 2" if task.extras["task"] == "jigsaw" else "?")
    assert found.strata["task"]["jigsaw"].value == 50
    assert found.strata["task"]["ocr"].value == 0
