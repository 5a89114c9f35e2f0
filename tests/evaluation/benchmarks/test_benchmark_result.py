"""Results of a benchmark: clustered intervals, costs by hand, examples, and a file round trip."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from error_cases import raises
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.config.load import load_recipe
from saccade.errors import DataError
from saccade.evaluation import benchmark_result
from saccade.evaluation.benchmark_result import (
    ANSWER_CATEGORIES,
    NUM_EXAMPLES,
    build_benchmark_result,
    compute_costs,
    compute_intervals,
    describe_conditions,
    read_benchmark_results,
    select_examples,
    write_benchmark_result,
)
from saccade.evaluation.benchmarks.base import Answer, Grade, GradedAnswer, compute_accuracy, grade, grade_episodes
from saccade.metrics.statistics import compute_interval, estimate_clustered_mean
from saccade.types import (
    AnswerType,
    Block,
    BlockKind,
    Call,
    CallFormat,
    Episode,
    EpisodeStatus,
    Ledger,
    Reply,
    Score,
    ScoredEpisode,
    Task,
    Turn,
    Usage,
)

NASTY = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\x00\u202e\ud800|`*_\n#"


def bound(name, **settings):
    return plugins.resolve("evaluation.benchmarks", name, settings)()


def some(name, folder, count, **settings):
    """Return a benchmark and the tasks of a copy of its first rows."""
    benchmark = bound(name, **settings)
    rows = [row for _, row in zip(range(count), MAKERS[name](), strict=False)]
    return benchmark, benchmark.load_tasks(write_copy(name, folder, rows), allow_incomplete=True)


def build_result(benchmark, scored, **given):
    return build_benchmark_result(benchmark, scored, grade_episodes(benchmark, scored), **given)


def results_file(folder, name):
    return folder / "evaluations" / f"{name}.jsonl"


def build_scored(task, reply, *, calls=0, end=EpisodeStatus.ANSWERED, error=None, usage=None):
    """Return a scored episode that answers after a turn of calls, if any."""
    call = Call(name="crop_video", arguments={}, call_format=CallFormat.NATIVE)
    look = Reply(text="", blocks=(Block(kind=BlockKind.CALL, body="", is_closed=True, call=call),) * calls)
    last = Reply(text=reply, blocks=(Block(kind=BlockKind.TEXT, body=reply, is_closed=True),))
    turns = tuple(Turn(reply=reply) for reply in ([look, last] if calls else [last]))
    episode = Episode(task=task, environment="parallel", ledger=Ledger(), turns=turns, status=end, error=error)
    return ScoredEpisode(episode=replace(episode, usage=usage or Usage()), score=Score(value=0.0, parts={}))


def question(name, value):
    task = Task(id=name, question="?", media=(), answer_type=AnswerType.OPEN, ground_truth="")
    return GradedAnswer(task=task, answer=Answer(text="a"), grade=Grade(extracted="a", value=value))


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_interval_of_a_mean_is_that_over_clusters():
    draw = random.Random(0)
    results = [question(str(i), float(draw.random() < 0.4)) for i in range(60)]
    units = [f"v{i // 3:02}" for i in range(60)]
    plain = estimate_clustered_mean([100 * result.value for result in results], units, bounds=(0.0, 100.0))
    assert compute_intervals(results, units, compute_accuracy)["accuracy"] == pytest.approx((plain.low, plain.high))


def test_questions_of_one_video_form_one_cluster():
    values = [float(i % 2) for i in range(20)]
    alone = [question(str(i), value) for i, value in enumerate(values)]
    thrice = [question(f"{i}-{copy}", value) for i, value in enumerate(values) for copy in range(3)]
    units = [f"v{i // 3:02}" for i in range(60)]
    wide = compute_intervals(alone, [f"v{i:02}" for i in range(20)], compute_accuracy)
    assert compute_intervals(thrice, units, compute_accuracy) == wide
    low, high = compute_intervals(thrice, [graded.task.id for graded in thrice], compute_accuracy)["accuracy"]
    assert wide["accuracy"][0] < low
    assert high < wide["accuracy"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric", "rows"), [("dynamath", "worst_case", 5010), ("wemath", "score_strict", 1740)]
)
def test_interval_of_a_metric_over_clusters(name, metric, rows, tmp_path):
    benchmark, tasks = some(name, tmp_path, rows)
    chosen = sorted({benchmark.cluster_key(task) for task in tasks})[:3]
    tasks = [task for task in tasks if benchmark.cluster_key(task) in chosen]
    # One of three problems is all wrong; the metric counts whole problems.
    answers = {
        task.id: Answer(text="no" if benchmark.cluster_key(task) == chosen[0] else str(task.ground_truth))
        for task in tasks
    }
    results = grade(benchmark, tasks, answers, scoring="lenient")
    found = compute_intervals(
        results, [benchmark.cluster_key(result.task) for result in results], benchmark.compute_metrics
    )
    assert found[metric] == pytest.approx(compute_interval([0, 100, 100], bounds=(0, 100)))


def test_metric_of_one_cluster_has_one_cluster():
    def statistic(sample):
        b = [100 * graded.value for graded in sample if graded.task.id.startswith("b")]
        return {**compute_accuracy(sample), **({"b": sum(b) / len(b)} if b else {})}

    results = [*(question(f"a{i}", 0.0) for i in range(9)), question("b", 1.0)]
    found = compute_intervals(results, [result.task.id for result in results], statistic)
    assert found["b"] == (0, 100)
    assert found["accuracy"][0] == 0 < found["accuracy"][1] < 50


def test_many_clusters_are_left_out_in_groups(monkeypatch):
    draw = random.Random(0)
    results = [question(f"{i:03}", float(draw.random() < 0.4)) for i in range(300)]
    clusters, calls = [result.task.id for result in results], []

    def count(sample):
        calls.append(len(sample))
        return compute_accuracy(sample)

    whole = compute_intervals(results, clusters, compute_accuracy)["accuracy"]
    monkeypatch.setattr(benchmark_result, "MAX_JACKKNIFE_GROUPS", 100)
    assert compute_intervals(results, clusters, count)["accuracy"] == pytest.approx(whole, abs=1.5)
    assert len(calls) == 101


def test_no_complete_problem_is_no_mastery(tmp_path):
    benchmark, tasks = some("wemath", tmp_path, 20)  # steps alone
    assert build_result(benchmark, [build_scored(task, "C") for task in tasks]).score == 0


def test_one_question_shows_nothing():
    assert compute_intervals([question("a", 1.0)], ["a"], compute_accuracy) == {"accuracy": (0, 100)}


# ---- samples -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_of_a_problem_are_separate_problems(tmp_path):
    benchmark, tasks = some("wemath", tmp_path, 1740)
    whole = [task for task in tasks if benchmark.cluster_key(task) == benchmark.cluster_key(tasks[0])]
    scored = [build_scored(task, reply) for reply in (str(whole[0].ground_truth), "no", "no") for task in whole]
    results = grade_episodes(benchmark, scored)
    assert sorted({result.sample_index for result in results}) == [0, 1, 2]
    assert benchmark.compute_metrics(results)["score_strict"] == pytest.approx(100 / 3)
    result = build_result(benchmark, scored)
    assert (result.num_answers, result.num_tasks, result.num_clusters) == (3 * len(whole), len(whole), 1)


@pytest.mark.slow
def test_rates_are_averaged_over_samples(tmp_path):
    benchmark, tasks = some("videomme", tmp_path, 8)
    ground_truth = [f"<answer>{task.ground_truth}</answer>" for task in tasks]
    first = [
        build_scored(task, truth if i < 1 else "no")
        for i, (task, truth) in enumerate(zip(tasks, ground_truth, strict=True))
    ]
    second = [
        build_scored(task, truth if i < 4 else "D")
        for i, (task, truth) in enumerate(zip(tasks, ground_truth, strict=True))
    ]
    single = [build_result(benchmark, scored).metrics["accuracy_of_answered"] for scored in (first, second)]
    assert single == [100, 50]
    result = build_result(benchmark, [*first, *second])
    assert result.metrics["accuracy_of_answered"] == pytest.approx(75)  # pooled, of nine answered, 5 / 9
    assert result.metrics["accuracy"] == pytest.approx(100 * 5 / 16)


# ---- contents ------------------------------------------------------------------------------------------------------


def test_costs_are_means_over_all_episodes():
    task = question("a", 1.0).task
    usage = Usage(unsampled_tokens=1000, sampled_tokens=100, visual_tokens=800, seconds=3.0)
    found = compute_costs(
        [build_scored(task, "x", calls=2, usage=usage), build_scored(task, "x", end=EpisodeStatus.ABORTED)]
    )
    expected = {"calls": 1, "frac_with_tool_call": 0.5, "turns": 1.5, "visual_tokens": 400, "text_tokens": 150}
    assert found == {**expected, "seconds": 1.5}


def make_graded(count, sort):
    marks = {
        "wrong": Grade(extracted="B", value=0.0),
        "right": Grade(extracted="A", value=1.0),
        "partly": Grade(extracted="A", value=0.5),
    }
    marks |= {"unparsed": Grade(extracted=None, value=0.0), "undecided": Grade(extracted="x", value=None)}
    marks |= {"error": marks["unparsed"]}
    error = "the video can't be decoded" if sort == "error" else None
    for at in range(count):
        task = Task(id=f"{sort}-{at}", question="q" * 1000, media=(), answer_type=AnswerType.OPEN, ground_truth="A")
        yield GradedAnswer(task=task, answer=Answer(text="<think>B?</think> said", error=error), grade=marks[sort])


def test_examples_per_category_are_independent_of_order():
    results = [answer for sort in ANSWER_CATEGORIES for answer in make_graded(9, sort)]
    found = select_examples(results)
    assert [example.category for example in found] == [sort for sort in ANSWER_CATEGORIES for _ in range(NUM_EXAMPLES)]
    assert all(example.task_id.startswith(example.category) for example in found)
    assert found[0].response == "the video can't be decoded"
    assert found[-1].response == "said"
    assert all(len(example.question) < 500 for example in found)
    mixed = results[:]
    random.Random(1).shuffle(mixed)
    assert select_examples(mixed) == found


def test_fixed_denominators_and_file_round_trip(tmp_path):
    benchmark, tasks = some("videomme", tmp_path / "copy", 30)
    scored = [build_scored(task, "<answer>C</answer>") for task in tasks[:10]]
    scored += [
        build_scored(task, "<answer>C</answer>", end=EpisodeStatus.ABORTED, error=NASTY) for task in tasks[10:20]
    ]
    scored += [build_scored(task, NASTY.lower()) for task in tasks[20:]]
    result = build_result(benchmark, scored, conditions={"tools": "off"})
    assert (result.num_tasks, result.num_answers, result.num_clusters, result.errors, result.unparsed) == (
        30,
        30,
        10,
        10,
        10,
    )
    assert result.score == pytest.approx(100 / 3)
    assert result.interval[0] < result.score < result.interval[1]
    assert result.stratum_intervals["duration"].keys() == result.strata["duration"].keys()
    assert result.interval == pytest.approx(result.stratum_intervals["duration"]["short"])  # all of them are short
    write_benchmark_result(results_file(tmp_path, "videomme"), result)
    assert read_benchmark_results(tmp_path) == {"videomme": result}


def test_conditions_describe_the_evaluation():
    settings = [
        "temperature=0.7",
        "frame_budgets=[8,16]",
        "use_tools=false",
        "num_tasks=9",
        "environment_settings.max_tool_turns=9",
    ]
    settings = [f"evaluation.{setting}" for setting in settings]
    recipe = load_recipe("tiny/para_grpo", [*settings, "environment.settings.max_tool_turns=2"])
    found = describe_conditions(recipe, None)
    assert found["environment"] == "tool_calling"
    assert found["environment.max_tool_turns"] == "9"
    assert (found["tools"], found["temperature"], found["frames"]) == ("off", "0.7", "8, 16")
    assert found["at most"] == "9 questions"
    assert not {"samples", "options"} & found.keys()
    several = describe_conditions(
        load_recipe("tiny/para_grpo", ["evaluation.num_samples=4", "evaluation.shuffle_options=true"]), None
    )
    assert (several["samples"], several["options"]) == ("4 per question", "shuffled for each sample")
    assert describe_conditions(recipe, Path("runs/a/rl/00004"))["model"] == "runs/a/rl/00004"


def test_unreadable_result_raises(tmp_path):
    with raises(DataError, key=str(tmp_path)):
        read_benchmark_results(tmp_path)
    path = tmp_path / "evaluations" / "mlvu.benchmark_result.json"
    path.parent.mkdir()
    path.write_text("{")
    with raises(DataError, key=str(path)):
        read_benchmark_results(tmp_path)
    path.write_text(json.dumps({"benchmark": "mlvu"}))
    with raises(DataError, key=str(path)):
        read_benchmark_results(tmp_path)
