"""Parts of benchmarks and several attempts: even over the strata, problems whole, metrics per attempt."""

from collections import Counter

import pytest
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.evaluation.benchmarks._benchmark import UNPARSED, Answer, Mark, Result, report
from saccade.evaluation.portions import Portion


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stratum", "limit", "each"),
    [
        ("videomme", "duration", 30, 10),
        ("mlvu", "task", 21, 3),
        ("vsibench", "question_type", 20, 2),
        ("hrbench", "rotation", 16, 4),
        ("dynamath", "variant", 57, 5),
    ],
)
def test_a_benchmark_is_spread_over_its_own_strata(tmp_path, name, stratum, limit, each):
    benchmark = plugins.bind("evaluation.benchmarks", name, {})()
    tasks = benchmark.tasks(write_copy(name, tmp_path))
    few = Portion(limit=limit, strata=tuple(benchmark.strata.values()), unit=benchmark.together).of(tasks)
    held = Counter(benchmark.strata[stratum](one) for one in few)
    assert set(held.values()) == {each}
    assert set(held) == {benchmark.strata[stratum](one) for one in tasks}


@pytest.mark.slow
def test_problems_of_several_steps_stay_whole(tmp_path):
    benchmark = plugins.bind("evaluation.benchmarks", "wemath", {})()
    tasks = benchmark.tasks(write_copy("wemath", tmp_path))
    few = Portion(limit=35, strata=tuple(benchmark.strata.values()), unit=benchmark.together).of(tasks)
    whole = Counter(each.extras["problem"] for each in tasks)
    held = Counter(each.extras["problem"] for each in few)
    assert 30 < len(few) <= 35
    assert all(held[problem] == whole[problem] for problem in held)


def results(tasks, values):
    """Results of tasks with these values, those of one task being its attempts; None: nothing could be read."""
    seen, found = Counter(), []
    for task, value in zip(tasks, values, strict=True):
        mark = UNPARSED if value is None else Mark(read="C", value=value)
        found.append(Result(task=task, answer=Answer(text="C"), mark=mark, attempt=seen[task.id]))
        seen[task.id] += 1
    return found


def test_attempts_are_averaged_and_not_mixed(tmp_path):
    """Of two variants of a seed each attempt solves one: in no attempt is the seed solved, although both once were."""
    benchmark = plugins.bind("evaluation.benchmarks", "dynamath", {})()
    rows = [row for row in MAKERS["dynamath"]() if row["key"] == "1"][:2]
    one, two = benchmark.tasks(write_copy("dynamath", tmp_path, rows), subset=True)
    found = report(benchmark, results([one, two, one, two], [1, 0, 0, 1]))
    assert (found.n, found.errors, found.unparsed) == (2, 0, 0)
    assert found.metrics == {"average": 50, "worst_case": 0}
    assert found.at_k == {"avg@2": 50, "pass@2": 100}
    found = report(benchmark, results([one, one, two, two], [1, 0, 1, None]))
    assert found.metrics == {"average": 50, "worst_case": 50}
    assert (found.n, found.unparsed) == (2, 1)
    assert {cell.n for cell in found.strata["variant"].values()} == {1}
    assert report(benchmark, results([one, two], [1, 1])).at_k == {}
