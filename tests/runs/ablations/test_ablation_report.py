"""Reports of hand-written results: numbers, warnings, and missing seeds."""

import json

import pytest
from ablation_cases import SET, build_columns

from saccade.errors import RunError
from saccade.runs.ablations.report import describe_components, format_curve_title, write_report
from saccade.runs.ablations.run import JobPool, format_plan, record_invocation, run
from saccade.runs.ablations.schedule import Ablation


@pytest.fixture
def build_ablation(tmp_path):
    def make(**settings):
        (tmp_path / "mine.yaml").write_text(SET)
        ablation = Ablation.from_spec(str(tmp_path / "mine.yaml"), **settings)
        record_invocation(tmp_path, "saccade ablate mine.yaml")
        return ablation

    return make


def write_results(folder, name, rows=(), **evaluations):
    """Write the results of a job."""
    (folder / name).mkdir(parents=True)
    (folder / name / "results.json").write_text(json.dumps(evaluations))
    lines = [json.dumps({"stage": "rl", "step": step, **row}) for step, row in enumerate(rows, 1)]
    (folder / name / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def build_evaluations(accuracy, tokens=5):
    """Return evaluations with and without tools of four tasks with two frame budgets."""
    columns = build_columns(accuracy=accuracy, frame_budget=[4, 4, 32, 32], sampled_tokens=[tokens] * 4)
    return {"greedy": columns, "tools_off": {**columns, "accuracy": [0.0, 0.0, 1.0, 0.0]}}


def read(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_numbers_match_the_results(build_ablation, tmp_path):
    ablation = build_ablation(conditions=["one"], seeds=2)
    rows = [{"accuracy": 0.25, "calls": 1.0}, {"accuracy": 0.5, "calls": 2.0}, {"accuracy": 0.75, "calls": 3.0}]
    for seed in (0, 1):
        write_results(
            tmp_path,
            ablation.get_initial_evaluation_folder("one", "plain", seed),
            **build_evaluations([0.0, 0.0, 1.0, 0.0]),
        )
        write_results(tmp_path, f"seed-{seed}/one/plain", rows, **build_evaluations([1.0, 0.0, 1.0, 0.0]))
        write_results(tmp_path, f"seed-{seed}/one/hot", rows, **build_evaluations([1.0, 1.0, 1.0, float(seed)]))
    page, tables = write_report(tmp_path, ablation, {})
    by_title = {table.title: table for table in tables}
    plain, hot = by_title["Accuracy, greedy: one"].rows
    assert by_title["Accuracy, greedy: one"].header[4] == "after, minus plain"
    assert [cell.partition(" ")[0] for cell in plain] == ["plain", "0.25", "0.50", "+0.25", "", "8"]
    # Seeds' means of hot: 0.75 and 1.0; against plain's 0.5 that is 0.25 and 0.5.
    assert hot[2].startswith("0.88 [")
    assert hot[4].startswith("+0.38 [")
    assert "{-1.21, +1.96}" in hot[4]
    found = {(row["table"], row["variant"], row.get("slice")): row for row in read(tmp_path)["tables"]}
    assert found["Accuracy, greedy", "hot", None]["after"]["seed_means"] == [0.75, 1.0]
    assert found["Accuracy, greedy", "hot", None]["against_baseline"]["seed_means"] == [0.25, 0.5]
    assert "against_baseline" not in found["Accuracy, greedy", "plain", None]
    assert found["Accuracy, greedy", "plain", None]["gain"]["mean"] == 0.25
    less = "Accuracy, greedy minus greedy, tools off, by frames in the overview"
    assert found[less, "plain", "K=4"]["after"]["mean"] == 0.5
    assert found[less, "plain", "K=32"]["after"]["mean"] == 0.0
    assert found["last third of the steps", "plain", "calls"]["after"]["mean"] == 3.0
    assert "2 seeds" in page.read_text()


@pytest.mark.slow
def test_variant_without_results_is_named(build_ablation, tmp_path):
    ablation = build_ablation(seeds=2)
    write_results(tmp_path, "seed-0/one/plain", [{"accuracy": 0.5}], **build_evaluations([1.0, 0.0, 1.0, 0.0]))
    write_report(tmp_path, ablation, {"seed-1/one/plain": "the <disk> is full"})
    text, page = ((tmp_path / f"report.{end}").read_text().replace("\\", "") for end in ("md", "html"))
    assert "plain in one (1), hot in one (0), stuck in two (0)" in text
    assert "seed-1/one/plain" in text
    assert "the &lt;disk&gt; is full" in text
    assert "&lt;disk&gt;" in page
    assert "| plain | – | 0.50 [" in text


def test_report_without_results(build_ablation, tmp_path):
    write_report(tmp_path, build_ablation(), {})
    assert "all 3 seeds" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "plots").exists()


def test_quick_is_labeled_everywhere(build_ablation, tmp_path):
    ablation = build_ablation(quick=True)
    assert format_plan(ablation).startswith("QUICK (no evidence): ")
    write_report(tmp_path, ablation, {})
    for name in ("report.md", "report.html", "results.json"):
        assert "QUICK" in (tmp_path / name).read_text()


def test_report_has_metadata(build_ablation, tmp_path):
    ablation = build_ablation(seeds=2, settings=["rl.prompts_per_step=3"])
    write_report(tmp_path, ablation, {})
    metadata = read(tmp_path)["metadata"]
    assert metadata["seeds"] == "0, 1"
    assert metadata["command"] == "saccade ablate mine.yaml"
    assert metadata["RL"] == "4 steps of 3 groups of 8"
    assert metadata["held-out tasks"] == "192 per seed, on 24 clips"
    assert "saccade" in metadata["versions"]
    assert "planned" in metadata["time"]


def test_report_names_every_initial_checkpoint(build_ablation):
    rows = {name: settings for name, _, settings in describe_components(build_ablation(conditions=["two"]))}
    assert "continues_from: base_sft" in rows["initial checkpoint: other"]
    assert rows["initial checkpoint: base_sft"] == "4 steps of SFT"


def test_curve_titles():
    assert format_curve_title("call_reward_diff/K=32") == "Reward with calls minus without, K=32"
    assert (
        format_curve_title("frac_correct_with_negative_advantage")
        == "Correct episodes with a negative advantage, share"
    )
    assert format_curve_title("whatever") == "whatever"


def test_a_report_that_cannot_be_written_hides_no_failed_job(build_ablation, tmp_path, monkeypatch):
    failures = {"seed-0/one/plain": "the disk is full", "seed-0/one/hot": "not run"}
    monkeypatch.setattr(JobPool, "run", lambda *arguments: failures)
    (tmp_path / "results.json").mkdir()
    with pytest.raises(RunError) as caught:
        run(tmp_path, build_ablation(seeds=1), add_task=None, print_line=None)
    assert "2 jobs" in str(caught.value)
    assert "first seed-0/one/plain: the disk is full; the report failed, too:" in str(caught.value)
    assert "results.json" in str(caught.value)


def test_the_plan_of_one_seed_has_no_plural(build_ablation):
    plan = format_plan(build_ablation(seeds=1, conditions=["two"]))
    assert "1 variant in conditions x 1 seed = 1 run of 4 RL steps" in plan
    assert "(s)" not in plan
