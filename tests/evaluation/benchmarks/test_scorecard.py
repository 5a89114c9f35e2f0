"""Scorecards: intervals over units, costs by hand, answers to look at; what is kept is read back the same."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from toy_rows import MAKERS, write_copy

from saccade import plugins
from saccade.config import load_recipe
from saccade.errors import DataError
from saccade.evaluation.benchmarks._benchmark import Answer, Mark, Result, accuracy, grade
from saccade.evaluation.benchmarks._episodes import results_of
from saccade.evaluation.intervals import estimate
from saccade.evaluation.scorecard import (
    RESAMPLES,
    SHOWN,
    SORTS,
    conditions,
    costs_of,
    intervals,
    keep,
    read_cards,
    scorecard,
    shown,
)
from saccade.types import (
    Block,
    BlockKind,
    Call,
    End,
    Episode,
    Form,
    Kind,
    Ledger,
    Reply,
    Score,
    Scored,
    Task,
    Turn,
    Usage,
)

NASTY = "</style></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}\x00\u202e\ud800|`*_\n#"


def bound(name, **settings):
    return plugins.bind("evaluation.benchmarks", name, settings)()


def some(name, folder, count, **settings):
    """A benchmark and the tasks of a copy of its first rows."""
    benchmark = bound(name, **settings)
    rows = [row for _, row in zip(range(count), MAKERS[name](), strict=False)]
    return benchmark, benchmark.tasks(write_copy(name, folder, rows), subset=True)


def card_of(benchmark, scored, **given):
    return scorecard(benchmark, scored, results_of(benchmark, scored), **given)


def results_file(folder, name):
    return folder / "evaluations" / f"{name}.jsonl"


def attempt(task, said, *, calls=0, end=End.ANSWERED, error=None, usage=None):
    """A scored episode that answers after a turn of calls, if any."""
    call = Call(name="crop_video", arguments={}, form=Form.TRAINED)
    look = Reply(text="", blocks=(Block(kind=BlockKind.CALL, body="", closed=True, call=call),) * calls)
    last = Reply(text=said, blocks=(Block(kind=BlockKind.TEXT, body=said, closed=True),))
    turns = tuple(Turn(reply=reply) for reply in ([look, last] if calls else [last]))
    episode = Episode(task=task, agent="parallel", ledger=Ledger(), turns=turns, end=end, error=error)
    return Scored(episode=replace(episode, usage=usage or Usage()), score=Score(value=0.0, parts={}))


def question(name, value):
    task = Task(id=name, question="?", media=(), kind=Kind.OPEN, gold="")
    return Result(task=task, answer=Answer(text="a"), mark=Mark(read="a", value=value))


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_that_of_the_metrics_module():
    draw = random.Random(0)
    results = [question(str(i), float(draw.random() < 0.4)) for i in range(60)]
    units = [f"v{i // 3:02}" for i in range(60)]
    plain = estimate([100 * each.value for each in results], units, resamples=RESAMPLES)
    assert intervals(results, units, accuracy)["accuracy"] == pytest.approx((plain.low, plain.high))


def test_questions_of_one_video_are_one_piece_of_evidence():
    values = [float(i % 2) for i in range(20)]
    alone = [question(str(i), value) for i, value in enumerate(values)]
    thrice = [question(f"{i}-{copy}", value) for i, value in enumerate(values) for copy in range(3)]
    units = [f"v{i // 3:02}" for i in range(60)]
    wide = intervals(alone, [f"v{i:02}" for i in range(20)], accuracy)
    assert intervals(thrice, units, accuracy) == wide
    low, high = intervals(thrice, [each.task.id for each in thrice], accuracy)["accuracy"]
    assert wide["accuracy"][0] < low
    assert high < wide["accuracy"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric", "rows"), [("dynamath", "worst_case", 5010), ("wemath", "score_strict", 1740)]
)
def test_a_unit_that_is_drawn_twice_counts_twice(name, metric, rows, tmp_path):
    benchmark, tasks = some(name, tmp_path, rows)
    chosen = sorted({benchmark.unit(task) for task in tasks})[:3]
    tasks = [task for task in tasks if benchmark.unit(task) in chosen]
    # of three problems one is all wrong, so the metric is a multiple of a third in every resample
    said = {task.id: Answer(text="no" if benchmark.unit(task) == chosen[0] else str(task.gold)) for task in tasks}
    results = grade(benchmark, tasks, said, extractor="tolerant")
    seen = set()

    def watched(sample):
        found = benchmark.metrics(sample)
        seen.add(round(found[metric], 6))
        return found

    assert intervals(results, [benchmark.unit(each.task) for each in results], watched)[metric] == (0, 100)
    assert seen == {0, round(100 / 3, 6), round(200 / 3, 6), 100}


def test_a_number_that_few_units_have_is_of_the_resamples_that_have_it():
    def statistic(sample):
        b = [100 * each.value for each in sample if each.task.id.startswith("b")]
        return {**accuracy(sample), **({"b": sum(b) / len(b)} if b else {})}

    results = [*(question(f"a{i}", 0.0) for i in range(9)), question("b", 1.0)]
    found = intervals(results, [each.task.id for each in results], statistic)
    assert found["b"] == (100, 100)
    assert found["accuracy"][0] == 0 < found["accuracy"][1]


def test_no_whole_problem_is_no_mastery(tmp_path):
    benchmark, tasks = some("wemath", tmp_path, 20)  # steps alone
    assert card_of(benchmark, [attempt(task, "C") for task in tasks]).score == 0


def test_one_question_is_a_point():
    assert intervals([question("a", 1.0)], ["a"], accuracy) == {"accuracy": (100, 100)}


# ---- attempts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_attempts_at_a_problem_are_each_a_problem(tmp_path):
    benchmark, tasks = some("wemath", tmp_path, 1740)
    whole = [task for task in tasks if benchmark.unit(task) == benchmark.unit(tasks[0])]
    scored = [attempt(task, said) for said in (str(whole[0].gold), "no", "no") for task in whole]
    results = results_of(benchmark, scored)
    assert sorted({each.attempt for each in results}) == [0, 1, 2]
    assert benchmark.metrics(results)["score_strict"] == pytest.approx(100 / 3)
    card = card_of(benchmark, scored)
    assert (card.attempts, card.n, card.units) == (3 * len(whole), len(whole), 1)


@pytest.mark.slow
def test_rates_are_averaged_over_attempts_and_never_pooled(tmp_path):
    benchmark, tasks = some("videomme", tmp_path, 8)
    gold = [f"<answer>{task.gold}</answer>" for task in tasks]
    first = [attempt(task, said if i < 1 else "no") for i, (task, said) in enumerate(zip(tasks, gold, strict=True))]
    second = [attempt(task, said if i < 4 else "D") for i, (task, said) in enumerate(zip(tasks, gold, strict=True))]
    single = [card_of(benchmark, each).metrics["accuracy_of_answered"] for each in (first, second)]
    assert single == [100, 50]
    card = card_of(benchmark, [*first, *second])
    assert card.metrics["accuracy_of_answered"] == pytest.approx(75)  # pooled, of nine answered, 5 / 9
    assert card.metrics["accuracy"] == pytest.approx(100 * 5 / 16)
    # a resample averages alike: with one unit each of them is the whole
    both = results_of(benchmark, [*first, *second])
    assert intervals(both, ["v"] * 16, benchmark.metrics)["accuracy_of_answered"] == pytest.approx((75, 75))


# ---- what it holds -------------------------------------------------------------------------------------------------


def test_costs_are_means_over_everything_that_was_tried():
    task = question("a", 1.0).task
    usage = Usage(prompt_tokens=1000, sampled_tokens=100, visual_tokens=800, seconds=3.0)
    found = costs_of([attempt(task, "x", calls=2, usage=usage), attempt(task, "x", end=End.ABORTED)])
    assert (found.calls, found.tool_share, found.turns) == (1, 0.5, 1.5)
    assert (found.visual_tokens, found.text_tokens, found.seconds) == (400, 150, 1.5)


def graded(count, sort):
    marks = {
        "wrong": Mark(read="B", value=0.0),
        "right": Mark(read="A", value=1.0),
        "partly": Mark(read="A", value=0.5),
    }
    marks |= {"unparsed": Mark(read=None, value=0.0), "undecided": Mark(read="x", value=None)}
    marks |= {"error": marks["unparsed"]}
    error = "the video can't be decoded" if sort == "error" else None
    for at in range(count):
        task = Task(id=f"{sort}-{at}", question="q" * 1000, media=(), kind=Kind.OPEN, gold="A")
        yield Result(task=task, answer=Answer(text="<think>B?</think> said", error=error), mark=marks[sort])


def test_a_few_answers_of_each_sort_are_shown_whatever_their_order():
    results = [each for sort in SORTS for each in graded(9, sort)]
    found = shown(results)
    assert [each.sort for each in found] == [sort for sort in SORTS for _ in range(SHOWN)]
    assert all(each.id.startswith(each.sort) for each in found)
    assert found[0].said == "the video can't be decoded"
    assert found[-1].said == "said"
    assert all(len(each.question) < 500 for each in found)
    mixed = results[:]
    random.Random(1).shuffle(mixed)
    assert shown(mixed) == found


def test_fixed_denominators_and_rounds_through_a_file(tmp_path):
    benchmark, tasks = some("videomme", tmp_path / "copy", 30)
    scored = [attempt(task, "<answer>C</answer>") for task in tasks[:10]]
    scored += [attempt(task, "<answer>C</answer>", end=End.ABORTED, error=NASTY) for task in tasks[10:20]]
    scored += [attempt(task, NASTY.lower()) for task in tasks[20:]]
    card = card_of(benchmark, scored, known={"tools": "off"})
    assert (card.n, card.attempts, card.units, card.errors, card.unparsed) == (30, 30, 10, 10, 10)
    assert card.score == pytest.approx(100 / 3)
    assert card.interval[0] < card.score < card.interval[1]
    assert card.bounds["duration"].keys() == card.strata["duration"].keys()
    assert card.interval == pytest.approx(card.bounds["duration"]["short"])  # all of them are short
    keep(results_file(tmp_path, "videomme"), card)
    assert read_cards(tmp_path) == {"videomme": card}


def test_conditions_are_those_of_the_evaluation():
    settings = ["temperature=0.7", "frames=[8,16]", "tools=false", "limit=9", "agent.max_turns=9"]
    settings = [f"evaluation.{each}" for each in settings]
    recipe = load_recipe("tiny/para_grpo", [*settings, "agent.settings.max_turns=2"])
    found = conditions(recipe, None)
    assert found["agent"] == "parallel"
    assert found["agent's max_turns"] == "9"
    assert (found["tools"], found["temperature"], found["frames"]) == ("off", "0.7", "8, 16")
    assert found["at most"] == "9 questions"
    assert not {"attempts", "options"} & found.keys()
    several = conditions(
        load_recipe("tiny/para_grpo", ["evaluation.repeat=4", "evaluation.shuffle_options=true"]), None
    )
    assert (several["attempts"], several["options"]) == ("4 at each question", "in another order for each attempt")
    assert conditions(recipe, Path("runs/a/rl/00004"))["model"] == "runs/a/rl/00004"


def test_a_card_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no evaluation on a benchmark; make one with `saccade eval"):
        read_cards(tmp_path)
    path = tmp_path / "evaluations" / "mlvu.report.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(DataError, match=r"mlvu\.report\.json can't be read: .*; delete it and evaluate again"):
        read_cards(tmp_path)
    path.write_text(json.dumps({"benchmark": "mlvu"}))
    with pytest.raises(DataError, match=r"mlvu\.report\.json, field extractor: .*; delete it and evaluate again"):
        read_cards(tmp_path)
