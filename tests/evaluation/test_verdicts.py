"""What a judge said is part of an evaluation wherever its results are read; what nobody decided is counted."""

from dataclasses import replace

from commands import good
from evaluation_cases import scored, task

from saccade.data.record import append, write_jsonl
from saccade.evaluation.metrics import summarize
from saccade.evaluation.paired import compare_files
from saccade.evaluation.report import compare, count_ungraded, grids, read_evaluations
from saccade.evaluation.run import Record
from saccade.evaluation.verdicts import Verdict
from saccade.types import Score

TASKS = [task(f"w-{i}") for i in range(4)]


def opened(of, accuracy, undecided):
    """An episode that answers "red", as a benchmark's rule scores it."""
    return replace(scored(of, 0), score=Score(value=accuracy, parts={"accuracy": accuracy, "undecided": undecided}))


def written(folder, name="mmvu"):
    """A results file: one answer is right by the rule, one wrong, of two nobody knows."""
    path = folder / "evaluations" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for one, accuracy, open_ in zip(TASKS, (1, 0, 0, 0), (0, 0, 1, 1), strict=True):
        each = opened(one, float(accuracy), float(open_))
        append(path, Record(task=one.id, frames=4, repeat=0, under="seed=1", scored=each))
    return path


def judge(path, values, answer="red"):
    said = [Verdict(task=one.id, answer=answer, value=value) for one, value in zip(TASKS, values, strict=True)]
    write_jsonl(path.with_suffix(".verdicts.jsonl"), said)


def test_a_comparison_knows_what_judges_said_and_counts_what_none_did(tmp_path):
    one, two = written(tmp_path / "a"), written(tmp_path / "b")
    assert compare_files(one, two).undecided == (2, 2)
    # the rule's own marks stay, whatever is said of them; where nothing is said, nothing is decided
    judge(two, (0.0, 1.0, 1.0, None))
    pair = compare_files(one, two)
    assert (pair.accuracy[0].mean, pair.accuracy[1].mean, pair.undecided) == (0.25, 0.5, (2, 1))
    assert (pair.only_first, pair.only_second) == (0, 1)
    assert "2 / 1" in good("eval", "compare", one, two)
    judge(two, (1.0, 1.0, 1.0, 1.0), answer="an answer that it no longer gives")
    assert compare_files(one, two).undecided == (2, 2)


def test_the_evaluations_of_a_run_are_read_with_their_verdicts(tmp_path):
    judge(written(tmp_path), (None, None, 1.0, 0.0))
    written(tmp_path, "by the rule")
    found = read_evaluations(tmp_path)
    assert found.keys() == {"mmvu", "by the rule"} == count_ungraded(tmp_path).keys()
    summaries = {name: summarize(each) for name, each in found.items()}
    assert {name: (each.accuracy.mean, each.undecided) for name, each in summaries.items()} == {
        "mmvu": (0.5, 0),
        "by the rule": (0.25, 2),
    }
    rows = {row[0]: row[1:] for row in grids(compare(found))[0].rows}
    assert sorted(rows["undecided"]) == ["0", "2"]
