"""Paired comparisons of two evaluations, against hand-computed numbers."""

import json
import math
from dataclasses import replace

import pytest
from commands import fail, good
from error_cases import raises
from evaluation_cases import make_scored, task

from saccade.cli.benchmark import resolve_cluster_key
from saccade.data.option_shuffle import shuffle_options
from saccade.errors import DataError
from saccade.evaluation.compare import (
    Evaluation,
    compare_evaluations,
    compare_files,
    read_evaluations,
    require_same_tasks,
)
from saccade.evaluation.records import Record
from saccade.evaluation.subset import StratifiedWeights
from saccade.metrics.statistics import compute_sign_test_p_value
from saccade.reporting.evaluation_report import build_pair_tables
from saccade.types import AnswerType, EpisodeStatus, UngradedEpisode
from saccade.utils.jsonl import append_jsonl

TASKS = [task(f"w-{i}") for i in range(10)]


def rows(values, *, calls=(), tasks=TASKS):
    """Return an episode per value; those whose index is in `calls` ran a tool."""
    return [
        make_scored(one, value, calls=int(i in calls)) for i, (one, value) in enumerate(zip(tasks, values, strict=True))
    ]


BARE = rows([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
LOOKED = rows([1, 1, 1, 0, 1, 1, 1, 0, 0, 1], calls=range(8))


def compare(**evaluations):
    """Compare two evaluations by name."""
    named = {name: Evaluation(scored=scored) for name, scored in evaluations.items()}
    require_same_tasks(named)
    return compare_evaluations(named, pairs=[tuple(named)])


def change(**evaluations):
    return compare(**evaluations).changes[0]


def table(comparison):
    return dict(build_pair_tables(comparison)[0].rows)


def test_paired_comparison():
    comparison = compare(bare=BARE, looked=LOOKED)
    assert [summary.accuracy.mean for summary in comparison.summaries.values()] == [0.4, pytest.approx(0.7)]
    found = comparison.changes[0]
    assert found.difference.mean == pytest.approx(0.3)
    assert found.difference.low < 0.3 < found.difference.high
    assert (found.only_before, found.only_after) == (1, 4)
    assert found.p_value == pytest.approx(2 * (1 + 5) / 32)


def test_tasks_about_one_clip_form_a_cluster():
    clips = [task(f"w-{i}", clip=f"clip{i % 2}") for i in range(10)]
    apart, together = (
        compare(bare=rows([0] * 10, tasks=tasks), looked=rows([0, 1] * 5, tasks=tasks, calls=range(10)))
        for tasks in (TASKS, clips)
    )
    one, other = apart.changes[0], together.changes[0]
    assert one.difference.low > 0
    assert not other.difference.is_significant
    found = [other.difference, together.summaries["looked"].accuracy, other.tool_effect.gain]
    assert [(interval.high, interval.n, interval.num_clusters) for interval in found] == [(1.0, 10, 2)] * 3
    assert other.difference.low < 0
    label = "tasks / clusters (files or problems)"
    assert (table(apart)[label], table(together)[label]) == ("10 / 10", "10 / 2")
    assert table(together)["significant"].startswith("no: 2 clusters")
    # With clusters, the test's row has a caveat.
    test, caveat = table(apart)["McNemar's exact test"], table(together)["McNemar's exact test"]
    assert len(caveat) > len(test)


def test_six_tasks_about_one_clip_are_never_significant():
    tasks = [task(f"w-{i}", clip="one") for i in range(6)]
    for outcomes in ([1] * 6, [1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 1]):
        found = change(bare=rows([0] * 6, tasks=tasks), looked=rows(outcomes, tasks=tasks)).difference
        assert (found.n, found.num_clusters, found.is_significant) == (6, 1, False)
        assert found.low < 0 < found.high
    apart = [task(f"w-{i}", clip=f"clip{i}") for i in range(6)]
    assert change(bare=rows([0] * 6, tasks=apart), looked=rows([1] * 6, tasks=apart)).difference.is_significant


def test_cluster_key_of_a_benchmark():
    variant = replace(task("v"), extras={"seed": "7"})
    assert resolve_cluster_key("dynamath")(variant) == "7"
    assert resolve_cluster_key("")(variant) == resolve_cluster_key("mlvu")(variant)
    with raises(DataError, key="benchmark", value="dynamath"):
        resolve_cluster_key("dynamath")(task("v"))


def test_files_record_their_benchmark_and_whether_tools_were_on(tmp_path):
    variants = [replace(task(f"v-{i}"), extras={"seed": str(i % 2)}) for i in range(4)]
    (tmp_path / "evaluations").mkdir()
    for name, use_tools in (("with", True), ("without", False)):
        for one in rows([0, 1, 1, 1], tasks=variants):
            record = Record(
                task=one.episode.task.digest,
                frame_budget=4,
                sample_index=0,
                fingerprint=f"seed=1, tools={use_tools}",
                outcome=one,
                benchmark="dynamath",
                use_tools=use_tools,
            )
            append_jsonl(tmp_path / "evaluations" / f"{name}.jsonl", record)
    found = read_evaluations(tmp_path)
    assert found["without"].is_control_of(found["with"])
    assert not found["with"].is_control_of(found["without"])
    assert not replace(found["without"], fingerprint="seed=2, tools=False").is_control_of(found["with"])
    files = (tmp_path / "evaluations" / f"{name}.jsonl" for name in ("without", "with"))
    comparison = compare_files(*files, get_cluster_key=resolve_cluster_key)
    assert comparison.changes[0].difference.num_clusters == 2
    assert comparison.changes[0].other_differences == ("tools",)


def test_tool_gain_and_harm_are_over_tasks_with_calls():
    tools = change(bare=BARE, looked=LOOKED).tool_effect
    # of the 8 with a call 4, 5, 6 are right only with tools and 3 only without; 9 was gained without a call
    assert (tools.with_tools, tools.num_tasks_with_call) == ("looked", 8)
    assert (tools.gain.mean, tools.harm.mean, tools.net) == (3 / 8, 1 / 8, 0.25)
    assert tools.gain.low < 3 / 8 < tools.gain.high
    turned = change(looked=LOOKED, bare=BARE).tool_effect
    assert (turned.with_tools, turned.gain, turned.harm) == ("looked", tools.gain, tools.harm)


def test_visual_tokens_of_both_evaluations():
    def with_visual_tokens(scores, *tokens):
        usages = [
            replace(scored_episode.episode.usage, visual_tokens=tokens[i % len(tokens)])
            for i, scored_episode in enumerate(scores)
        ]
        return [
            replace(scored_episode, episode=replace(scored_episode.episode, usage=usage))
            for scored_episode, usage in zip(scores, usages, strict=True)
        ]

    found = compare(dense=with_visual_tokens(BARE, 64), code=with_visual_tokens(LOOKED, 4, 12))
    assert [summary.visual_tokens for summary in found.summaries.values()] == [64, 8]
    assert table(found)["visual tokens per episode"] == "64.0 / 8.0, ratio 0.12"
    bare = compare(bare=with_visual_tokens(BARE, 0), code=with_visual_tokens(LOOKED, 4))
    assert table(bare)["visual tokens per episode"] == "0.0 / 4.0"
    neither = compare(bare=with_visual_tokens(BARE, 0), other=with_visual_tokens(LOOKED, 0))
    assert "visual tokens per episode" not in table(neither)


def test_tool_effect_needs_a_control():
    assert change(a=LOOKED, b=LOOKED).tool_effect is None
    assert change(a=BARE, b=BARE).tool_effect is None
    refused = [make_scored(one, 0, failing=1) for one in TASKS]  # calls without any tool
    assert change(a=BARE, b=refused).tool_effect is None
    assert change(a=refused, b=LOOKED).tool_effect.with_tools == "b"


@pytest.mark.parametrize(
    ("only", "p"),
    [((0, 0), 1), ((0, 1), 1), ((0, 5), 2 / 32), ((2, 8), 2 * 56 / 1024), ((8, 2), 2 * 56 / 1024), ((3, 3), 1)],
)
def test_the_exact_test(only, p):
    assert compute_sign_test_p_value(*only) == pytest.approx(p)


def test_the_exact_test_of_large_numbers():
    n, k = 4000, 1900
    by_hand = sum(math.comb(n, i) for i in range(k + 1)) * 2 / 2**n
    assert compute_sign_test_p_value(k, n - k) == pytest.approx(by_hand, rel=1e-9)
    # A normal approximation of 25,300 against 24,700 gives 0.0073; the exact test is within its correction.
    assert compute_sign_test_p_value(24_700, 25_300) == pytest.approx(math.erfc(599 / math.sqrt(2 * 50_000)), rel=1e-3)
    assert 0.0 <= compute_sign_test_p_value(100, 9900) < 1e-300


def test_samples_are_averaged_over_option_orders():
    one = replace(task("c"), answer_type=AnswerType.CHOICE, ground_truth="A", options=("red", "blue", "green"))
    old = [make_scored(one, value) for value in (1, 0, 0)]  # wrong: a third
    new = [
        make_scored(shuffle_options(one, seed=1, sample_index=i), value) for i, value in enumerate((1, 0))
    ]  # right: a half
    found = change(old=old, new=new)
    assert (found.only_before, found.only_after, found.difference.n) == (0, 1, 1)
    assert found.difference.mean == pytest.approx(1 / 2 - 1 / 3)


def test_failed_episode_is_wrong():
    broken = [make_scored(one, 1, end=EpisodeStatus.ABORTED, error="gone") for one in TASKS]
    assert compare(a=broken, b=BARE).summaries["a"].accuracy.mean == 0


def test_different_tasks_raise():
    with raises(DataError, key="tasks", value="w-8"):
        compare(a=BARE[:8], b=LOOKED)
    with raises(DataError, key="tasks", value="w-8"):
        compare(a=BARE, b=LOOKED[:8])
    changed = [*BARE[:9], make_scored(replace(TASKS[9], question="Another?"), 1)]
    with raises(DataError, key="tasks", value="w-9"):
        compare(a=BARE, b=changed)


def write(path, scored, under="seed=1, weights=a"):
    path.parent.mkdir(parents=True, exist_ok=True)
    for outcome in scored:
        append_jsonl(
            path,
            Record(task=outcome.episode.task.id, frame_budget=4, sample_index=0, fingerprint=under, outcome=outcome),
        )
    return path


def test_compare_command(tmp_path):
    for name, one in (("a", BARE), ("b", LOOKED)):
        write(tmp_path / name / "evaluations" / "test.jsonl", one, under=f"seed=1, weights={name}")
    output = good("eval", "compare", tmp_path / "a", tmp_path / "b", "--json", tmp_path / "out" / "pair.json")
    assert "+0.30 [" in output
    assert "p = 0.375" in output
    assert "0.38 [" in output
    found = json.loads((tmp_path / "out" / "pair.json").read_text())
    assert found["summaries"].keys() == {str(tmp_path / name / "evaluations" / "test.jsonl") for name in "ab"}
    (found,) = found["changes"]
    assert (found["only_before"], found["only_after"], found["other_differences"]) == (1, 4, ["weights"])
    assert (found["tool_effect"]["num_tasks_with_call"], found["tool_effect"]["net"]) == (8, 0.25)
    assert next(iter(table(compare(a=BARE, b=LOOKED)))) == "accuracy of a"
    file = tmp_path / "a" / "evaluations" / "test.jsonl"
    assert "+0.00 [-0.26, +0.26]" in good("eval", "compare", file, tmp_path / "a")


def test_limited_sample_estimates_the_full_set(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", one) for name, one in (("a", BARE), ("b", LOOKED))]
    assert "28" not in good("eval", "compare", *paths)
    # w-4 to w-9 stand for four tasks each: there 0 of 6 are right, and 4 of 6
    weights = {task.id: 1.0 if i < 4 else 4.0 for i, task in enumerate(TASKS)}
    StratifiedWeights(full_set_size=28, weights=weights, uncovered=0.25).write_unless_covered(paths[1])
    output = " ".join(good("eval", "compare", *paths, "--json", tmp_path / "pair.json").split())
    assert "10 of 28" in output
    assert "+0.30 [" in output
    assert "+0.54 [" in output
    assert "25%" in output
    whole = json.loads((tmp_path / "pair.json").read_text())
    estimates = [summary["full_set_accuracy"]["mean"] for summary in whole["summaries"].values()]
    assert estimates == pytest.approx([4 / 28, (3 + 4 * 4) / 28])
    assert whole["changes"][0]["full_set_difference"]["mean"] == pytest.approx(15 / 28)
    # The weights don't cover these tasks, so they are not those of the limit.
    StratifiedWeights(full_set_size=28, weights={"w-1": 28.0}, uncovered=0.0).write(paths[1])
    assert "28" not in good("eval", "compare", *paths)


def test_user_errors_are_one_line(tmp_path):
    one = write(tmp_path / "one.jsonl", BARE)
    compare = ["eval", "compare", one]
    fail(DataError, *compare, tmp_path / "none.jsonl", key=tmp_path / "none.jsonl")
    fail(DataError, *compare, tmp_path, key=tmp_path / "evaluations" / "test.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    fail(DataError, *compare, tmp_path / "empty.jsonl", key=tmp_path / "empty.jsonl")
    lost = UngradedEpisode(episode=BARE[0].episode, group_index=0, reason="the judge is gone")
    append_jsonl(
        tmp_path / "lost.jsonl", Record(task="t", frame_budget=4, sample_index=0, fingerprint="seed=1", outcome=lost)
    )
    line = fail(DataError, *compare, tmp_path / "lost.jsonl", key=tmp_path / "lost.jsonl")
    assert "the judge is gone" in line
    (tmp_path / "bad.jsonl").write_text("{}\n")
    fail(DataError, *compare, tmp_path / "bad.jsonl", key="task")
    fail(DataError, *compare, write(tmp_path / "less.jsonl", LOOKED[:9]), key="tasks", value="w-9")
