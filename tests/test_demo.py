"""`saccade demo`: the whole pipeline in one folder, with paired evaluations, resumable, reported."""

import json

import pytest
from commands import SMALL, count_visual_tokens, fail, good

from saccade.chat.renderer import load_renderer
from saccade.config.load import load_recipe
from saccade.data.synthetic import text_templates, validate_dataset
from saccade.errors import ConfigError, RunError
from saccade.evaluation.compare import read_evaluations
from saccade.reporting.examples import summarize_example
from saccade.runs.run_folder import Run

EVALUATIONS = {f"after_{stage}_{mode}" for stage in ("sft", "rl") for mode in ("sampled", "greedy", "no_tools")}
BREVITY = """
from saccade.types import Episode


def brevity(episode: Episode) -> float:
    return 1.0 - len(episode.ledger.sampled_tokens()) / 16
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "run"


@pytest.fixture(scope="module", autouse=True)
def output(folder):
    # An untrained model is never correct, so only the length of its replies gives different rewards.
    (folder.parent / "brevity.py").write_text(BREVITY)
    recipe = folder.parent / "brief.yaml"
    recipe.write_text(f"extends: tiny/para_grpo\nrewards:\n  {folder.parent / 'brevity.py'}:\n    weight: 1.0\n")
    return good("demo", recipe, *SMALL, "--seed", 3, "--out", folder)


def test_output_has_stages_and_headline(output, folder):
    begun = [line[:4] for line in output.splitlines() if line[1:4] == "/7 "]
    assert list(dict.fromkeys(begun)) == [f"{place}/7 " for place in range(1, 8)]
    for label in ("after SFT", "after RL", "sampled", "greedy", "greedy, no tools"):
        assert label in output
    assert output.rstrip().endswith(f"Report: {folder / 'report.html'}")


def test_one_wrong_question_is_shown_after_each_evaluation(output, folder):
    found = read_evaluations(folder)
    wrong = {one.episode.task.digest: one for one in found["after_sft_greedy"].scored if not one.score.is_correct}
    before = wrong[min(wrong)]
    after = next(one for one in found["after_rl_greedy"].scored if one.episode.task.digest == min(wrong))
    lines = [line for line in output.splitlines() if before.episode.task.question in line]
    assert len(lines) == 2
    assert [summarize_example(one) in line for one, line in zip((before, after), lines, strict=True)] == [True, True]


def test_data_is_valid(folder):
    assert validate_dataset(folder / "data").problems == ()
    assert (folder / "data" / "contact_sheet.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "data").glob("*/clips/*.mp4"))) == 7


def test_tokenizer_has_the_datas_phrases(folder):
    renderer = load_renderer(str(folder / "model"))
    assert all(len(renderer.encode(phrase)) == 1 for phrase in text_templates.TOKENIZER_PIECES)


def test_evaluations_are_paired(folder):
    found = read_evaluations(folder)
    assert set(found) == EVALUATIONS
    rows = {name: [(one.episode.task.digest, one.episode.frame_budget) for one in found[name].scored] for name in found}
    assert len({tuple(sorted(row)) for row in rows.values()}) == 1
    assert not any(result.was_executed for one in found["after_rl_no_tools"].scored for result in one.episode.results)


def test_sft_weights_are_kept(folder):
    first, last = (folder / stage / "step-000004" / "model.safetensors" for stage in ("sft", "rl"))
    assert first.read_bytes() != last.read_bytes()


def test_reports_have_the_same_content(folder):
    comparison = json.loads((folder / "comparison.json").read_text())
    assert set(comparison["summaries"]) == EVALUATIONS
    pairs = {(change["before"], change["after"]) for change in comparison["changes"]}
    assert ("after_sft_sampled", "after_rl_sampled") in pairs
    assert ("after_rl_no_tools", "after_rl_greedy") in pairs
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text().replace("\\_", "_")
        assert all(
            word in text
            for word in (
                *(*EVALUATIONS, "engine-trainer logprob difference", "peak memory", "sft, wall time"),
                "recipe.yaml --out",
            )
        ), name


def test_status_has_seconds_and_memory(folder):
    for name in ("data", "model", "sft", "sft_evaluation", "rl", "rl_evaluation"):
        status = Run.open(folder).read_json(f"finished_stages/{name}.json")
        assert status["seconds"] > 0
        assert status["memory_gib"] > 0


def test_quick_has_a_recipe_of_its_own(monkeypatch, tmp_path):
    recipes = []
    monkeypatch.setattr(
        "saccade.runs.demo.run_demo", lambda folder, recipe, **more: (recipes.append(recipe) or folder, [])
    )
    good("demo", "--out", tmp_path / "whole")
    good("demo", "--quick", "rl.steps=3", "--out", tmp_path / "quick")
    whole, quick = recipes
    assert quick.rl.steps == 3
    assert quick.sft.steps < whole.sft.steps
    assert "tool_call_penalty" not in quick.rewards
    fail(ConfigError, "demo", "tiny/map", "--quick", "--out", tmp_path / "map", key="--quick", value="tiny/map")


def test_second_invocation(folder, output):
    fail(RunError, "demo", "--out", folder, key=folder)
    fail(RunError, "demo", *SMALL, "--seed", 4, "--out", folder, "--resume", key="seed", value=4)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = good("demo", "--out", folder, "--resume")
    assert again[again.index("Accuracy on") :] == output[output.index("Accuracy on") :]
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert len(Run.open(folder).read_metrics("rl")) == 4


def test_demo_folder_is_a_run(folder):
    assert load_recipe(str(folder / "recipe.yaml")).seed == 3
    assert "after_rl_greedy" in good(
        "eval", folder, "--name", "again", "evaluation.num_samples=2", "evaluation.num_tasks=2"
    )
    results, arguments = folder / "evaluations" / "again.jsonl", ("--name", "again", "evaluation.temperature=0.5")
    fail(RunError, "eval", folder, *arguments, key=results, value=("settings",))
    (folder / "evaluations" / "again.jsonl").unlink()
    clip = folder / "data" / "test" / "clips" / "00000.mp4"
    assert count_visual_tokens(good("ask", "--video", clip, "How many flashes?", "--model", folder)) > 0


def test_folder_can_be_moved(folder, output, monkeypatch):
    moved = folder.parent / "elsewhere"
    folder.rename(moved)
    try:
        monkeypatch.chdir(moved)
        before = {path: path.read_bytes() for path in (moved / "evaluations").iterdir()}
        (moved / "finished_stages" / "rl_evaluation.json").unlink()
        again = good("demo", "--out", ".", "--resume")
        assert again[again.index("Accuracy on") : again.index("The run")] in output
        assert before == {path: path.read_bytes() for path in (moved / "evaluations").iterdir()}
        assert "data:image/jpeg" in (moved / "report.html").read_text()
        good("eval", ".", "--name", "moved", "evaluation.num_tasks=1")
        output = good("ask", "What?", "--video", "data/test/clips/00000.mp4", "--model", ".")
        assert count_visual_tokens(output) > 0
    finally:
        moved.rename(folder)
        (folder / "evaluations" / "moved.jsonl").unlink(missing_ok=True)
