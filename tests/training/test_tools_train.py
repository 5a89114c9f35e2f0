"""A tiny model learns to look by calls and by code: what is shown goes through SFT, RL and exams, token for token."""

import pytest

from saccade import exams, stages
from saccade.config import load_recipe
from saccade.data.rows import read_demos
from saccade.data.world import make_world, pieces
from saccade.model.tiny import make_tiny
from saccade.runlog import Run

SMALL = (
    "seed=5",
    "model.threads=1",
    "world={train: 3, validation: 1, test: 1}",
    "sampling.max_tokens=48",
    "sft={steps: 120, tokens_per_step: 400, save_every: 120, optim: {warmup: 5}}",
    "rl={steps: 2, prompts: 2, group: 4, optim: {lr: 1e-3, warmup: 0}}",
)

pytestmark = pytest.mark.slow


WAYS = [
    ("tiny/zoom_image", "qwen3_vl"),
    ("tiny/zoom_image", "qwen2_5_vl"),
    ("tiny/pyvision_image", "qwen3_vl"),
    ("tiny/pyvision_video", "qwen2_5_vl"),
]


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: "-".join(way))
def run(request, tmp_path_factory):
    """Cold start and two steps of RL, in one folder."""
    root, (name, family) = tmp_path_factory.mktemp("zoom"), request.param
    pictures = "world.image={cards: [2, 2], tasks_per_picture: 6, charts: 0}"
    more = [] if name == "tiny/pyvision_video" else [pictures]
    recipe = prepared(root, load_recipe(name, [*SMALL, *more, f"model.family={family}"]))
    stages.sft(root / "run", recipe, on_step=lambda *_: None)
    stages.rl(root / "run", recipe, resume=True, on_step=lambda *_: None)
    return Run.open(root / "run")


def prepared(root, recipe):
    """The recipe with a world and a model of its own."""
    make_world(root / "world", recipe.world, seed=0)
    demos = read_demos(root / "world/train/traces.jsonl")
    words = sorted({text for demo in demos for text in (demo.task.question, *demo.replies)})
    make_tiny(
        str(root / "model"),
        family=recipe.model.family,
        hidden=64,
        layers=2,
        vocabulary_text=words,
        phrases=pieces(recipe.world),
    )
    return stages.with_paths(recipe, folder=root / "run", model=root / "model", world=root / "world")


@pytest.mark.parametrize("side", [5, 10])
def test_charts_are_learned_whole(tmp_path, side):
    """Also where one of them is more than a row of a step's tokens."""
    sft = "sft={steps: 12, tokens_per_step: 400, practice_first: 1, optim: {warmup: 2}}"
    recipe = prepared(tmp_path, load_recipe("tiny/pyvision_image", [*SMALL[:3], f"world.image.chart_side={side}", sft]))
    stages.sft(tmp_path / "run", recipe, on_step=lambda *_: None)
    rows = list(Run.open(tmp_path / "run").metrics("sft"))
    assert all(row["trained_tokens"] >= 4 * side**2 for row in rows)  # a card is "red 7, " at least
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def in_the_prompt(run):
    """Visual tokens of every prompt: a small picture, or, where the video lives in the interpreter alone, nothing."""
    return run.recipe.agent.settings["image_pixels"][1] // 16**2 if run.recipe.world.media == "image" else 0


def test_it_learns_to_call(run):
    losses = [row["loss"] for row in run.metrics("sft")]
    assert losses[-1] < 0.25 * losses[0]


def test_what_is_trained_is_what_was_sampled(run):
    """The trainer's own logprobs of an attempt with pictures in its middle are the engine's."""
    rows = list(run.metrics("rl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["calls/succeeded"] > 0
    assert rows[0]["visual_tokens"] > in_the_prompt(run)
    learned = [row for row in rows if "logprob_gap_max" in row]
    assert learned
    assert all(row["logprob_gap_max"] < 1e-4 for row in learned)
    assert all(row["errors"] == 0 for row in rows)


def test_a_run_says_what_jails_its_code(run):
    start = run.read_json("versions.json")[-1]
    jails = {name: said for name, said in start.items() if name.startswith("jail of ")}
    assert list(jails) == (["jail of python, best_effort"] if run.recipe.agent.name == "code" else [])
    assert all("model-written code is" in said for said in jails.values())


def test_an_evaluation_counts_what_is_seen(run):
    tasks = run.path.parent / "world/train/tasks.jsonl"
    found = exams.evaluate(run.path, run.recipe, name="train", tasks=tasks, on_done=lambda *_: None)
    for each in found:
        shown = [picture for result in each.episode.results for picture in result.pictures]
        # A tiny model's token is a square of 16 pixels; a box needn't be one.
        zoomed = sum(picture.width * picture.height for picture in shown) // 16**2
        assert each.episode.usage.visual_tokens == in_the_prompt(run) + zoomed
    assert any(each.episode.results for each in found)
    off = run.recipe.model_copy(update={"evaluation": run.recipe.evaluation.model_copy(update={"tools": False})})
    found = exams.evaluate(run.path, off, name="train, tools off", tasks=tasks, on_done=lambda *_: None)
    assert {each.episode.usage.visual_tokens for each in found} == {in_the_prompt(run)}
