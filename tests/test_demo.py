"""`saccade demo`: everything in one folder, paired, resumable, reported."""

import json

import pytest
from commands import SMALL, bad, good

from saccade.chat.render import load_renderer
from saccade.config import load_recipe
from saccade.data.world import check_world, phrases
from saccade.evaluation.report import read_evaluations
from saccade.runlog import Run

EXAMS = {f"after {stage}{exam}" for stage in ("SFT", "RL") for exam in ("", ", sampled", ", tools off")}
BREVITY = """
from saccade.types import Episode, Task


def brevity(episode: Episode, task: Task) -> float:
    return 1.0 - len(episode.ledger.sampled_tokens()) / 16
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "run"


@pytest.fixture(scope="module", autouse=True)
def output(folder):
    # A model this young is never right, so there is something to learn only from how long it talks.
    (folder.parent / "brevity.py").write_text(BREVITY)
    recipe = folder.parent / "brief.yaml"
    recipe.write_text(f"extends: tiny/para_grpo\nrewards:\n  {folder.parent / 'brevity.py'}:\n    weight: 1.0\n")
    return good("demo", recipe, *SMALL, "--seed", 3, "--out", folder)


def test_it_tells_what_it_does_and_ends_with_the_headline(output, folder):
    begun = [line[:4] for line in output.splitlines() if line[1:4] == "/7 "]
    assert list(dict.fromkeys(begun)) == [f"{place}/7 " for place in range(1, 8)]
    for words in (
        "after SFT",
        "after RL",
        "tools off",
        "sampled",
        "blind floor",
        "gain by RL",
        "not shown",
        "peak memory",
    ):
        assert words in output
    assert "nats at most" in output
    assert output.rstrip().endswith(f"The report: {folder / 'report.html'}")


def test_the_world_is_sound_and_can_be_looked_at(folder):
    assert check_world(folder / "world").problems == ()
    assert (folder / "world" / "sheet.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "world").glob("*/clips/*.mp4"))) == 7


def test_the_model_knows_the_worlds_phrases_as_words(folder):
    renderer = load_renderer(str(folder / "model"))
    assert all(len(renderer.encode(phrase)) == 1 for phrase in phrases.PIECES)


def test_exams_are_paired_before_and_after(folder):
    found = read_evaluations(folder)
    assert set(found) == EXAMS
    rows = {name: [(one.episode.task.digest, one.episode.frames) for one in found[name]] for name in found}
    assert len({tuple(sorted(each)) for each in rows.values()}) == 1
    assert not any(result.executed for one in found["after RL, tools off"] for result in one.episode.results)


def test_the_weights_of_sft_stay(folder):
    first, last = (folder / stage / "step-000004" / "model.safetensors" for stage in ("sft", "rl"))
    assert first.read_bytes() != last.read_bytes()


def test_numbers_text_and_page_say_the_same(folder):
    comparison = json.loads((folder / "comparison.json").read_text())
    assert set(comparison["summaries"]) == EXAMS
    pairs = {(each["before"], each["after"]) for each in comparison["changes"]}
    assert ("after SFT, sampled", "after RL, sampled") in pairs
    assert ("after RL, tools off", "after RL") in pairs
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text()
        assert all(word in text for word in (*EXAMS, "engine-trainer gap", "peak memory", "sft, wall time")), name


def test_marks_keep_seconds_and_memory(folder):
    for name in ("world", "model", "sft", "sft_exams", "rl", "rl_exams"):
        mark = Run.open(folder).read_json(f"done/{name}.json")
        assert mark["seconds"] > 0
        assert mark["memory_gib"] > 0


def test_a_second_start_says_what_to_do_and_a_finished_one_is_told_again(folder, output):
    assert "go on with --resume, or choose another folder with --out" in bad("demo", "--out", folder)
    assert "with seed=3, not 4" in bad("demo", *SMALL, "--seed", 4, "--out", folder, "--resume")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = good("demo", "--out", folder, "--resume")
    assert again[again.index("Accuracy on") :] == output[output.index("Accuracy on") :]
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert len(Run.open(folder).metrics("rl")) == 4


def test_the_run_is_like_any_other(folder):
    assert load_recipe(str(folder / "recipe.yaml")).seed == 3
    assert "after RL" in good("eval", folder, "--name", "again", "evaluation.repeat=2", "evaluation.limit=2")
    assert "other settings" in bad("eval", folder, "--name", "again", "evaluation.temperature=0.5")
    (folder / "evaluations" / "again.jsonl").unlink()
    clip = folder / "world" / "test" / "clips" / "00000.mp4"
    assert "visual tokens" in good("ask", "--video", clip, "How many flashes?", "--model", folder)


def test_it_can_be_moved(folder, output, monkeypatch):
    moved = folder.parent / "elsewhere"
    folder.rename(moved)
    try:
        monkeypatch.chdir(moved)
        before = {path: path.read_bytes() for path in (moved / "evaluations").iterdir()}
        (moved / "done" / "rl_exams.json").unlink()
        again = good("demo", "--out", ".", "--resume")
        assert again[again.index("Accuracy on") : again.index("The run")] in output
        assert before == {path: path.read_bytes() for path in (moved / "evaluations").iterdir()}
        assert "data:image/jpeg" in (moved / "report.html").read_text()
        good("eval", ".", "--name", "moved", "evaluation.limit=1")
        assert "visual tokens" in good("ask", "What?", "--video", "world/test/clips/00000.mp4", "--model", ".")
    finally:
        moved.rename(folder)
        (folder / "evaluations" / "moved.jsonl").unlink(missing_ok=True)
