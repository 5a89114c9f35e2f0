"""A limited evaluation speaks of the whole: weights by hand, sums that hold for any strata, and estimates."""

from collections import Counter

import pytest
from evaluation_cases import scored, task
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import DataError
from saccade.evaluation.benchmarks._benchmark import Answer, Benchmark, Mark, accuracy, extra, grade
from saccade.evaluation.benchmarks._rules import mean_of_means
from saccade.evaluation.expansion import Expansion, read_expansion, weigh
from saccade.evaluation.portions import Portion
from saccade.evaluation.report import compare, grids
from saccade.evaluation.scoreboard import grids as board
from saccade.evaluation.scorecard import keep, read_card, scorecard
from saccade.types import Kind, Task


def made(rows):
    """Tasks with the rows of two tables; a row may be several names, or None."""
    return [
        Task(id=f"t-{i}", question="?", media=(), kind=Kind.OPEN, gold="red", extras={"a": a, "b": b})
        for i, (a, b) in enumerate(rows)
    ]


STRATA = (lambda task: task.extras["a"], lambda task: task.extras["b"])
NAMES = st.sampled_from([None, "x", "y", "z", ["x", "y"]])
ROWS = st.lists(st.tuples(NAMES, st.sampled_from("pq")), min_size=2, max_size=40)


def test_weights_by_hand():
    places = {f"x{i}": (("x",), ("p",) if i < 6 else ("q",)) for i in range(8)}  # six of x p, two of x q
    places |= {f"y{i}": (("y",), ("p",)) for i in range(4)}  # and four of y
    weights, unseen = weigh(places, {"x0", "x1", "x6", "y0", "y1"})
    assert weights == {"x0": 3, "x1": 3, "x6": 2, "y0": 2, "y1": 2}
    assert not unseen
    # of x q none was asked: x p stands for all of x; of y none: x stands for it
    weights, unseen = weigh(places, {"x0", "x1"})
    assert weights == {"x0": 6, "x1": 6}
    assert unseen == {"x6", "x7", "y0", "y1", "y2", "y3"}


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 40))
def test_what_was_asked_stands_for_all_and_rows_for_their_size(rows, limit):
    tasks = made(rows)
    portion = Portion(limit=limit, strata=STRATA)
    asked, found = portion.limited(tasks), portion.expansion(tasks)
    if len(asked) == len(tasks):
        assert found is None
        return
    assert found.weights.keys() == {each.id for each in asked}
    assert found.whole == len(tasks)
    assert sum(found.weights.values()) == pytest.approx(len(tasks))
    assert min(found.weights.values()) >= 1 - 1e-9
    assert 0 <= found.unseen < 1
    if found.unseen:
        return

    def names(each):
        return (str(each.extras["a"]), each.extras["b"])

    sizes, held = Counter(map(names, tasks)), Counter()
    for each in asked:
        held[names(each)] += found.weights[each.id]
    assert held == pytest.approx(sizes)


def benchmark_of(count):
    """A benchmark of two tables, by which the easy ones are rare in the whole and as many in a limited sample."""

    def rule(text, task):
        return Mark(read=text, value=float(text == "right"))

    return Benchmark(
        name="mine",
        hub="",
        patterns=(),
        count=count,
        read=lambda row, copy: [],
        official=rule,
        tolerant=rule,
        headline="accuracy",
        metrics=lambda results: {**accuracy(results), "mean_of_rows": mean_of_means(results, extra("a"))},
        strata={"a": STRATA[0], "b": STRATA[1]},
    )


def test_the_estimate_is_the_whole_s_own_where_strata_decide_and_the_plain_mean_is_not(tmp_path):
    tasks = made([("easy", "p")] * 10 + [("hard", "p")] * 60 + [("hard", "q")] * 30)
    said = {each.id: "right" if each.extras["a"] == "easy" or each.extras["b"] == "q" else "no" for each in tasks}
    benchmark, portion = benchmark_of(100), Portion(limit=12, strata=STRATA)
    asked = portion.of(tasks)
    results = grade(benchmark, asked, {each.id: Answer(text=said[each.id]) for each in asked})
    episodes = [scored(each, 1.0) for each in asked]
    card = scorecard(benchmark, episodes, results, expansion=portion.expansion(tasks), known={"a limited sample": "x"})
    whole = benchmark.metrics(grade(benchmark, tasks, {name: Answer(text=text) for name, text in said.items()}))
    assert whole == pytest.approx({"accuracy": 40, "mean_of_rows": 100 * (1 + 1 / 3) / 2})
    assert card.whole.metrics == pytest.approx(whole)
    assert card.metrics["accuracy"] == 75  # rows alike: six easy ones, three of six hard ones
    low, high = card.whole.intervals["accuracy"]
    assert low < 40 < high
    assert card.whole.questions == 100
    # it is told apart wherever it stands
    cells = {cell for grid in board({"mine": card}, {}) for row in (grid.header, *grid.rows) for cell in row}
    assert {"accuracy, official, a limited sample", "accuracy, official, of all 100, estimated"} <= cells
    assert {"% of the 12 asked", "% of all 100, estimated", "12 of 100"} <= cells
    keep(tmp_path / "mine.jsonl", card)
    assert read_card(tmp_path / "mine.report.json") == card


def test_a_run_s_own_tasks_are_estimated_as_well():
    tasks = [task(f"w-{i}", question="at" if i < 2 else "when") for i in range(10)]
    portion = Portion(limit=4)
    few = [scored(each, float(each.extras["question"] == "at")) for each in portion.of(tasks)]
    found = compare({"a": few}, expansions={"a": portion.expansion(tasks)})
    summary = found.summaries["a"]
    assert (summary.accuracy.mean, summary.whole.mean, summary.whole_tasks) == (0.5, pytest.approx(0.2), 10)
    rows = dict(row for row in grids(found)[0].rows)
    assert rows["… of all tasks, estimated from a limited sample"].startswith("0.20 [")
    # a file that holds more than that limit's is not one of it
    more = [*few, scored(task("w-99"), 1.0)]
    assert compare({"a": more}, expansions={"a": portion.expansion(tasks)}).summaries["a"].whole is None


def test_it_is_kept_beside_the_results_and_a_smaller_limit_takes_nothing_away(tmp_path):
    results = tmp_path / "test.jsonl"
    assert read_expansion(results) is None
    results.touch()
    large = Expansion(whole=9, weights={"a": 3.0, "b": 3.0, "c": 3.0}, unseen=0.0)
    small = Expansion(whole=9, weights={"a": 4.5, "b": 4.5}, unseen=0.0)
    for one, kept in ((small, small), (large, large), (small, large)):
        one.keep(results)
        assert read_expansion(results) == kept
    Expansion(whole=9, weights={"a": 4.5, "z": 4.5}, unseen=0.0).keep(results)
    assert read_expansion(results).weights.keys() == {"a", "z"}
    results.unlink()  # of other results, which are gone
    large.keep(results)
    small.keep(results)
    assert read_expansion(results) == small
    for text in ("{", "[]", '{"whole": 3}'):
        (tmp_path / "test.expansion.json").write_text(text)
        with pytest.raises(DataError, match=r"test\.expansion\.json.*; delete it, and evaluate again"):
            read_expansion(results)
