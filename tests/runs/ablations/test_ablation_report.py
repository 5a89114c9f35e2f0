"""Reports of what jobs left, written by hand: numbers, warnings, and what is missing."""

import json

import pytest
from lab_cases import SET, exam

from saccade.lab.plan import Lab
from saccade.lab.report import parts_of, title_of_curve, write_report
from saccade.lab.run import note_start, planned


@pytest.fixture
def lab_of(tmp_path):
    def make(**settings):
        (tmp_path / "mine.yaml").write_text(SET)
        lab = Lab.of(str(tmp_path / "mine.yaml"), **settings)
        note_start(tmp_path, "saccade lab mine.yaml")
        return lab

    return make


def left(folder, name, rows=(), **exams):
    """What a job leaves."""
    (folder / name).mkdir(parents=True)
    (folder / name / "facts.json").write_text(json.dumps(exams))
    lines = [json.dumps({"stage": "rl", "step": step, **row}) for step, row in enumerate(rows, 1)]
    (folder / name / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def exams(right, tokens=5):
    """Greedy and without tools, of four tasks with two frame budgets each."""
    found = exam(accuracy=right, frames=[4, 4, 32, 32], sampled_tokens=[tokens] * 4)
    return {"greedy": found, "tools_off": {**found, "accuracy": [0.0, 0.0, 1.0, 0.0]}}


def read(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_numbers_stand_as_they_were_measured(lab_of, tmp_path):
    lab = lab_of(conditions=["one"], seeds=2)
    rows = [{"accuracy": 0.25, "calls": 1.0}, {"accuracy": 0.5, "calls": 2.0}, {"accuracy": 0.75, "calls": 3.0}]
    for seed in (0, 1):
        left(tmp_path, lab.before("one", "plain", seed), **exams([0.0, 0.0, 1.0, 0.0]))
        left(tmp_path, f"seed-{seed}/one/plain", rows, **exams([1.0, 0.0, 1.0, 0.0]))
        left(tmp_path, f"seed-{seed}/one/hot", rows, **exams([1.0, 1.0, 1.0, float(seed)]))
    page, tables = write_report(tmp_path, lab, {})
    by_title = {table.title: table for table in tables}
    plain, hot = by_title["Accuracy, greedy: one"].rows
    assert by_title["Accuracy, greedy: one"].header[4] == "after, minus plain"
    assert [cell.partition(" ")[0] for cell in plain] == ["plain", "0.25", "0.50", "+0.25", "", "8"]
    # Seeds' means of hot: 0.75 and 1.0; against plain's 0.5 that is 0.25 and 0.5.
    assert hot[2].startswith("0.88 [")
    assert hot[4].startswith("+0.38 [")
    assert "{-1.21, +1.96}" in hot[4]
    found = {(row["table"], row["arm"], row.get("slice")): row for row in read(tmp_path)["tables"]}
    assert found["Accuracy, greedy", "hot", None]["after"]["each"] == [0.75, 1.0]
    assert found["Accuracy, greedy", "hot", None]["against_baseline"]["each"] == [0.25, 0.5]
    assert "against_baseline" not in found["Accuracy, greedy", "plain", None]
    assert found["Accuracy, greedy", "plain", None]["gain"]["mean"] == 0.25
    less = "Accuracy, greedy minus greedy, tools off, by frames in the overview"
    assert found[less, "plain", "K=4"]["after"]["mean"] == 0.5
    assert found[less, "plain", "K=32"]["after"]["mean"] == 0.0
    assert found["last third of the steps", "plain", "calls"]["after"]["mean"] == 3.0
    assert "2 seed(s)" in page.read_text()


@pytest.mark.slow
def test_an_arm_that_left_nothing_is_named_and_stops_nobody(lab_of, tmp_path):
    lab = lab_of(seeds=2)
    left(tmp_path, "seed-0/one/plain", [{"accuracy": 0.5}], **exams([1.0, 0.0, 1.0, 0.0]))
    write_report(tmp_path, lab, {"seed-1/one/plain": "the <disk> is full"})
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "plain in one (1), hot in one (0), stuck in two (0)" in text
    assert "seed-1/one/plain failed: the <disk> is full" in text
    assert "&lt;disk&gt;" in page
    assert "| plain | – | 0.50 [" in text


def test_a_report_of_nothing_is_a_report(lab_of, tmp_path):
    write_report(tmp_path, lab_of(), {})
    assert "Not every arm has all 3 seeds" in (tmp_path / "report.md").read_text()
    assert list((tmp_path / "plots").iterdir()) == []


def test_quick_says_so_everywhere(lab_of, tmp_path):
    lab = lab_of(quick=True)
    assert planned(lab).startswith("QUICK (no evidence): ")
    write_report(tmp_path, lab, {})
    for name in ("report.md", "report.html", "results.json"):
        assert "QUICK" in (tmp_path / name).read_text()
        assert "No figure here is evidence" in (tmp_path / name).read_text()


def test_the_report_says_how_it_came_about(lab_of, tmp_path):
    lab = lab_of(seeds=2, settings=["rl.prompts=3"])
    write_report(tmp_path, lab, {})
    facts = read(tmp_path)["facts"]
    assert facts["seeds"] == "0, 1"
    assert facts["command"] == "saccade lab mine.yaml"
    assert facts["RL"] == "4 steps of 3 groups of 8"
    assert facts["held-out tasks"] == "192 per seed, on 24 clips"
    assert "saccade" in facts["versions"]
    assert "planned" in facts["time"]


def test_the_report_names_every_start_the_ones_that_others_go_on_from_too(lab_of):
    found = {name: settings for name, _, settings in parts_of(lab_of(conditions=["two"]))}
    assert "after: usual" in found["start: other"]
    assert found["start: usual"] == "4 steps of SFT"


def test_curves_have_titles():
    assert title_of_curve("call_gain/K=32") == "Reward of calling over skipping, K=32"
    assert title_of_curve("punished") == "Correct episodes with a negative advantage, share"
    assert title_of_curve("whatever") == "whatever"
