"""The list of runs: state and best numbers, also of damaged and unfinished ones."""

from commands import fail, good
from viewer_cases import make_run

from saccade.errors import RunError
from saccade.reporting.run_summary import describe_summary, summarize_run
from saccade.utils.jsonl import append_jsonl


def test_runs_are_listed_with_their_state_and_best_validation(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, num_steps=2)
    for step, accuracy in ((1, 0.25), (2, 0.75), (3, 0.5)):
        row = {"stage": "rl_validation", "step": step, "greedy/accuracy": accuracy, "greedy/episodes": 8}
        append_jsonl(tmp_path / "runs" / "b" / "metrics.jsonl", row)
    summary = summarize_run(tmp_path / "runs" / "b", lambda folder: False)
    assert (summary.state, summary.best, len(summary.evaluations)) == ("stopped", ("greedy", 0.75, 2), 2)
    assert describe_summary(summary)[2:] == ("0.750 (greedy, step 2)", "2")
    output = good("runs", tmp_path / "runs")
    assert [line.split()[0] for line in output.splitlines()[1:]] == ["b", "a"]  # the newest is first
    assert "0.750 (greedy, step 2)" in output


def test_a_damaged_run_is_named(tmp_path):
    folder = make_run(tmp_path / "runs" / "a", num_steps=1)
    (folder / "metrics.jsonl").write_text("no JSON\n{}\n")
    assert "metrics.jsonl" in good("runs", tmp_path / "runs")
    fail(RunError, "runs", tmp_path / "nothing", key=tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no run" in good("runs", tmp_path / "empty")
