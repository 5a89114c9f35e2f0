"""Two evaluations of the same tasks, against numbers worked out by hand."""

import json
import math
from dataclasses import replace

import pytest
from commands import bad, good
from evaluation_cases import scored, task

from saccade.commands.bench import unit_of_results
from saccade.data.record import append
from saccade.errors import DataError
from saccade.evaluation.expansion import Expansion
from saccade.evaluation.options import shuffled
from saccade.evaluation.paired import compare, grids, mcnemar
from saccade.evaluation.run import Record
from saccade.types import End, Kind, Unscored

TASKS = [task(f"w-{i}") for i in range(10)]


def rows(values, *, calls=(), tasks=TASKS):
    """An attempt per value; those whose index is in `calls` ran a tool."""
    return [scored(one, value, calls=int(i in calls)) for i, (one, value) in enumerate(zip(tasks, values, strict=True))]


BARE = rows([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
LOOKED = rows([1, 1, 1, 0, 1, 1, 1, 0, 0, 1], calls=range(8))


def test_a_pair_in_numbers():
    found = compare(("bare", BARE), ("looked", LOOKED))
    assert [each.mean for each in found.accuracy] == [0.4, pytest.approx(0.7)]
    assert found.difference.mean == pytest.approx(0.3)
    assert found.difference.low < 0.3 < found.difference.high
    assert (found.only_first, found.only_second) == (1, 4)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 32)


def test_tasks_about_one_clip_are_drawn_together():
    clips = [task(f"w-{i}", clip=f"clip{i % 2}") for i in range(10)]
    apart, together = (
        compare(("bare", rows([0] * 10, tasks=tasks)), ("looked", rows([0, 1] * 5, tasks=tasks, calls=range(10))))
        for tasks in (TASKS, clips)
    )
    assert (apart.units, together.units) == (10, 2)
    assert apart.difference.low > 0
    found = [together.difference, together.accuracy[1], together.tools.gain]
    assert [(each.low, each.high, each.n) for each in found] == [(0.0, 1.0, 10)] * 3
    table = dict(grids(together)[0].rows)
    assert table["difference, paired"].endswith("over 10 tasks, drawn as the 2 files or problems that they are about")
    assert table["McNemar's exact test"].endswith("if tasks were independent")
    assert dict(grids(apart)[0].rows)["difference, paired"].endswith("over 10 tasks")


def test_what_a_benchmark_takes_together_is_drawn_together(tmp_path):
    variant = replace(task("v"), extras={"seed": "7"})
    assert unit_of_results(tmp_path / "dynamath, tools off.jsonl")(variant) == "7"
    assert unit_of_results(tmp_path / "test.jsonl")(variant) == unit_of_results(tmp_path / "mlvu.jsonl")(variant)
    with pytest.raises(DataError, match=r"dynamath\.jsonl is called after the benchmark dynamath, but holds other"):
        unit_of_results(tmp_path / "dynamath.jsonl")(task("v"))


def test_what_tools_gain_and_harm_is_over_the_tasks_with_calls():
    tools = compare(("bare", BARE), ("looked", LOOKED)).tools
    # of the 8 with a call 4, 5, 6 are right only with tools and 3 only without; 9 was gained without a call
    assert (tools.with_tools, tools.called) == ("looked", 8)
    assert (tools.gain.mean, tools.harm.mean, tools.net) == (3 / 8, 1 / 8, 0.25)
    assert tools.gain.low < 3 / 8 < tools.gain.high
    turned = compare(("looked", LOOKED), ("bare", BARE)).tools
    assert (turned.with_tools, turned.gain, turned.harm) == ("looked", tools.gain, tools.harm)


def test_visual_tokens_stand_side_by_side():
    def seeing(scores, *tokens):
        usages = [replace(each.episode.usage, visual_tokens=tokens[i % len(tokens)]) for i, each in enumerate(scores)]
        return [
            replace(each, episode=replace(each.episode, usage=usage))
            for each, usage in zip(scores, usages, strict=True)
        ]

    found = compare(("dense", seeing(BARE, 64)), ("code", seeing(LOOKED, 4, 12)))
    assert found.visual_tokens == (64, 8)
    assert ("visual tokens per attempt", "64.0 / 8.0, 0.12 of the first") in grids(found)[0].rows
    blind = compare(("blind", seeing(BARE, 0)), ("code", seeing(LOOKED, 4)))
    assert ("visual tokens per attempt", "0.0 / 4.0") in grids(blind)[0].rows
    neither = compare(("blind", seeing(BARE, 0)), ("blinder", seeing(LOOKED, 0)))
    assert not [row for row in grids(neither)[0].rows if row[0].startswith("visual")]


def test_without_a_control_nothing_is_said_of_tools():
    assert compare(("a", LOOKED), ("b", LOOKED)).tools is None
    assert compare(("a", BARE), ("b", BARE)).tools is None
    refused = [scored(one, 0, failing=1) for one in TASKS]  # calls were written, and no tool was there
    assert compare(("a", BARE), ("b", refused)).tools is None
    assert compare(("a", refused), ("b", LOOKED)).tools.with_tools == "b"


@pytest.mark.parametrize(
    ("only", "p"),
    [((0, 0), 1), ((0, 1), 1), ((0, 5), 2 / 32), ((2, 8), 2 * 56 / 1024), ((8, 2), 2 * 56 / 1024), ((3, 3), 1)],
)
def test_the_exact_test(only, p):
    assert mcnemar(*only) == pytest.approx(p)


def test_the_exact_test_of_large_numbers():
    n, k = 4000, 1900
    by_hand = sum(math.comb(n, i) for i in range(k + 1)) * 2 / 2**n
    assert mcnemar(k, n - k) == by_hand
    assert 0.0 <= mcnemar(100, 9900) < 1e-300


def test_attempts_are_averaged_and_orders_of_options_are_one_task():
    one = replace(task("c"), kind=Kind.CHOICE, gold="A", choices=("red", "blue", "green"))
    old = [scored(one, value) for value in (1, 0, 0)]  # wrong: a third
    new = [scored(shuffled(one, seed=1, attempt=i), value) for i, value in enumerate((1, 0))]  # right: a half
    found = compare(("old", old), ("new", new))
    assert (found.only_first, found.only_second, found.difference.n) == (0, 1, 1)
    assert found.difference.mean == pytest.approx(1 / 2 - 1 / 3)


def test_a_broken_attempt_is_wrong():
    broken = [scored(one, 1, end=End.ABORTED, error="gone") for one in TASKS]
    assert compare(("a", broken), ("b", BARE)).accuracy[0].mean == 0


def test_other_tasks_are_refused():
    with pytest.raises(DataError, match="2 of the 10 tasks of 'b' are not in 'a', such as w-8"):
        compare(("a", BARE[:8]), ("b", LOOKED))
    with pytest.raises(DataError, match="2 of the 10 tasks of 'a' are not in 'b', such as w-8"):
        compare(("a", BARE), ("b", LOOKED[:8]))
    changed = [*BARE[:9], scored(replace(TASKS[9], question="Another?"), 1)]
    with pytest.raises(DataError, match="the task w-9 is not the same in 'a' and in 'b'"):
        compare(("a", BARE), ("b", changed))


def write(path, scored, under="seed=1, weights=a"):
    path.parent.mkdir(parents=True, exist_ok=True)
    for each in scored:
        append(path, Record(task=each.episode.task.id, frames=4, repeat=0, under=under, scored=each))
    return path


def test_the_command(tmp_path):
    for name, one in (("a", BARE), ("b", LOOKED)):
        write(tmp_path / name / "evaluations" / "test.jsonl", one, under=f"seed=1, weights={name}")
    said = good("eval", "compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "out" / "pair.json")
    assert "+0.30 [" in said
    assert "p = 0.375, no evidence of a difference" in said
    assert "0.38 [" in said
    assert "they were made with other" in said
    found = json.loads((tmp_path / "out" / "pair.json").read_text())
    assert (found["only_first"], found["only_second"], found["other"]) == (1, 4, ["weights"])
    assert (found["tools"]["called"], found["tools"]["net"]) == (8, 0.25)
    assert grids(compare(("a", BARE), ("b", LOOKED)))[0].rows[0][0] == "accuracy of a"
    file = tmp_path / "a" / "evaluations" / "test.jsonl"
    assert "+0.00 [+0.00, +0.00] over 10 tasks" in good("eval", "compare", file, tmp_path / "a")


def test_a_limited_sample_is_called_so_and_speaks_of_the_whole(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", one) for name, one in (("a", BARE), ("b", LOOKED))]
    assert "a limited sample" not in good("eval", "compare", *paths)
    # w-4 to w-9 stand for four tasks each: there 0 of 6 are right, and 4 of 6
    weights = {each.id: 1.0 if i < 4 else 4.0 for i, each in enumerate(TASKS)}
    Expansion(whole=28, weights=weights, unseen=0.25).keep(paths[1])
    said = " ".join(good("eval", "compare", *paths, "--json", tmp_path / "pair.json").split())
    assert "a limited sample 10 of 28 tasks, even over strata" in said
    assert "difference, paired +0.30 [" in said
    assert "difference, 28 tasks, estimated +0.54 [" in said
    assert "in strata of which none was asked 25%" in said
    whole = json.loads((tmp_path / "pair.json").read_text())["whole"]
    assert [each["mean"] for each in whole["accuracy"]] == pytest.approx([4 / 28, (3 + 4 * 4) / 28])
    assert whole["difference"]["mean"] == pytest.approx(15 / 28)
    # more tasks than it tells of: they are no longer those of that limit
    Expansion(whole=28, weights={"w-1": 28.0}, unseen=0.0).write(paths[1])
    assert "a limited sample" not in good("eval", "compare", *paths)


def test_what_cannot_be_compared_is_one_sentence(tmp_path):
    one = write(tmp_path / "one.jsonl", BARE)
    assert "there is no evaluation" in bad("eval", "compare", one, tmp_path / "none.jsonl")
    assert "name a results file, or a run and --name" in bad("eval", "compare", tmp_path, one)
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl holds no result; evaluate it first" in bad("eval", "compare", one, tmp_path / "empty.jsonl")
    lost = Unscored(episode=BARE[0].episode, index=0, reason="the judge is gone")
    append(tmp_path / "lost.jsonl", Record(task="t", frames=4, repeat=0, under="seed=1", scored=lost))
    assert "lost.jsonl holds no result: the judge is gone" in bad("eval", "compare", one, tmp_path / "lost.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert "bad.jsonl, line 1" in bad("eval", "compare", one, tmp_path / "bad.jsonl")
    assert "such as w-9" in bad("eval", "compare", one, write(tmp_path / "less.jsonl", LOOKED[:9]))
