"""Subsets of benchmarks and several samples: even over strata, problems whole, metrics per sample."""

from collections import Counter

import pytest
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.evaluation.benchmark_result import build_plain_result
from saccade.evaluation.benchmarks.base import UNPARSED, Answer, Grade, GradedAnswer
from saccade.evaluation.subset import Subset


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stratum", "limit", "per_stratum"),
    [
        ("videomme", "duration", 30, 10),
        ("mlvu", "task", 21, 3),
        ("vsibench", "question_type", 20, 2),
        ("hrbench", "rotation", 16, 4),
        ("dynamath", "variant", 57, 5),
    ],
)
def test_a_benchmark_is_spread_over_its_own_strata(tmp_path, name, stratum, limit, per_stratum):
    benchmark = plugins.resolve("evaluation.benchmarks", name, {})()
    tasks = benchmark.load_tasks(write_copy(name, tmp_path))
    few = Subset(limit=limit, strata=tuple(benchmark.strata.values()), joint_key=benchmark.joint_key).select(tasks)
    held = Counter(benchmark.strata[stratum](one) for one in few)
    assert set(held.values()) == {per_stratum}
    assert set(held) == {benchmark.strata[stratum](one) for one in tasks}


@pytest.mark.slow
def test_problems_stay_whole(tmp_path):
    benchmark = plugins.resolve("evaluation.benchmarks", "wemath", {})()
    tasks = benchmark.load_tasks(write_copy("wemath", tmp_path))
    few = Subset(limit=35, strata=tuple(benchmark.strata.values()), joint_key=benchmark.joint_key).select(tasks)
    whole = Counter(task.extras["problem"] for task in tasks)
    held = Counter(task.extras["problem"] for task in few)
    assert 30 < len(few) <= 35
    assert all(held[problem] == whole[problem] for problem in held)


def results(tasks, values):
    """Return results of tasks with these values, several of one task being its samples; None: unparsed."""
    seen, found = Counter(), []
    for task, value in zip(tasks, values, strict=True):
        mark = UNPARSED if value is None else Grade(extracted="C", value=value)
        found.append(GradedAnswer(task=task, answer=Answer(text="C"), grade=mark, sample_index=seen[task.id]))
        seen[task.id] += 1
    return found


def test_metrics_are_averaged_over_samples(tmp_path):
    """Each sample solves one of a seed's two variants, so no sample solves the seed."""
    benchmark = plugins.resolve("evaluation.benchmarks", "dynamath", {})()
    rows = [row for row in MAKERS["dynamath"]() if row["key"] == "1"][:2]
    one, two = benchmark.load_tasks(write_copy("dynamath", tmp_path, rows), allow_incomplete=True)
    found = build_plain_result(benchmark, results([one, two, one, two], [1, 0, 0, 1]))
    assert (found.num_tasks, found.errors, found.unparsed) == (2, 0, 0)
    assert found.metrics == {"average": 50, "worst_case": 0}
    assert found.at_k == {"avg@2": 50, "pass@2": 100}
    found = build_plain_result(benchmark, results([one, one, two, two], [1, 0, 1, None]))
    assert found.metrics == {"average": 50, "worst_case": 50}
    assert (found.num_tasks, found.unparsed) == (2, 1)
    assert {cell.n for cell in found.strata["variant"].values()} == {1}
    assert build_plain_result(benchmark, results([one, two], [1, 1])).at_k == {}
