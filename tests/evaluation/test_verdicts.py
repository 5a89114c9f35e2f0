"""Judge verdicts apply wherever results are read; undecided answers are counted."""

from dataclasses import replace

from commands import good
from evaluation_cases import make_scored, task

from saccade.evaluation.compare import compare_evaluations, compare_files, read_evaluations
from saccade.evaluation.judge_results import JudgeVerdict
from saccade.evaluation.records import Record
from saccade.metrics.episode_metrics import summarize
from saccade.reporting.evaluation_report import build_tables
from saccade.types import Score
from saccade.utils.jsonl import append_jsonl, write_jsonl

TASKS = [task(f"w-{i}") for i in range(4)]


def build_outcome(of, accuracy, undecided):
    """Return an episode that answers "red", as a benchmark's rule scores it."""
    return replace(make_scored(of, 0), score=Score(value=accuracy, parts={"undecided": undecided}, correct=accuracy))


def write_results(folder, name="mmvu"):
    """Write a results file: one answer is right by the rule, one wrong, two are undecided."""
    path = folder / "evaluations" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for one, accuracy, open_ in zip(TASKS, (1, 0, 0, 0), (0, 0, 1, 1), strict=True):
        outcome = build_outcome(one, float(accuracy), float(open_))
        append_jsonl(path, Record(task=one.id, frame_budget=4, sample_index=0, fingerprint="seed=1", outcome=outcome))
    return path


def judge(path, values, answer="red"):
    verdicts = [
        JudgeVerdict(task_id=one.id, answer=answer, value=value) for one, value in zip(TASKS, values, strict=True)
    ]
    write_jsonl(path.with_suffix(".verdicts.jsonl"), verdicts)


def test_comparison_applies_verdicts_and_counts_undecided(tmp_path):
    one, two = write_results(tmp_path / "a"), write_results(tmp_path / "b")

    def count_undecided():
        return tuple(summary.undecided for summary in compare_files(one, two).summaries.values())

    assert count_undecided() == (2, 2)
    # Verdicts don't change what the rule decided; a verdict without a value decides nothing.
    judge(two, (0.0, 1.0, 1.0, None))
    pair = compare_files(one, two)
    assert [summary.accuracy.mean for summary in pair.summaries.values()] == [0.25, 0.5]
    assert count_undecided() == (2, 1)
    assert (pair.changes[0].only_before, pair.changes[0].only_after) == (0, 1)
    assert "2 / 1" in good("eval", "compare", one, two)
    judge(two, (1.0, 1.0, 1.0, 1.0), answer="an answer that it no longer gives")
    assert count_undecided() == (2, 2)


def test_evaluations_are_read_with_their_verdicts(tmp_path):
    judge(write_results(tmp_path), (None, None, 1.0, 0.0))
    write_results(tmp_path, "by the rule")
    found = read_evaluations(tmp_path)
    assert found.keys() == {"mmvu", "by the rule"}
    summaries = {name: summarize(evaluation.scored) for name, evaluation in found.items()}
    assert {name: (summary.accuracy.mean, summary.undecided) for name, summary in summaries.items()} == {
        "mmvu": (0.5, 0),
        "by the rule": (0.25, 2),
    }
    rows = {row[0]: row[1:] for row in build_tables(compare_evaluations(found))[0].rows}
    assert sorted(rows["undecided"]) == ["0", "2"]
