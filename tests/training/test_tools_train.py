"""A tiny model learns to call tools and write Python: the images they show go through SFT, RL and evaluation."""

import pytest
from training_cases import write_alternating_reward

from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations
from saccade.data.synthetic import build_tokenizer_pieces, generate_dataset
from saccade.models.tiny import make_tiny_model
from saccade.runs import evaluation, pipeline
from saccade.runs.run_folder import Run

SMALL = (
    "seed=5",
    "model.num_threads=1",
    # One video or image, which the model learns by heart: from any initialization it calls its tool.
    "synthetic={train: 1, validation: 1, test: 1}",
    # At this temperature, 0.75 calls per episode and more succeeded over all recipes and two other initializations.
    "sampling={max_tokens: 48, temperature: 0.5}",
    "sft={steps: 120, tokens_per_step: 400, save_every: 120, optim: {warmup_steps: 5}}",
    "rl={steps: 2, prompts_per_step: 2, group_size: 4, optim: {lr: 1e-4, warmup_steps: 0}}",
    "rl.filters.statuses=null",
)
SFT_WEIGHTS = "sft/step-000120"

pytestmark = pytest.mark.slow


RECIPES = [
    ("tiny/zoom_image", "qwen3_vl"),
    pytest.param(("tiny/zoom_image", "qwen2_5_vl"), marks=pytest.mark.soak),
    ("tiny/pyvision_image", "qwen3_vl"),
    pytest.param(("tiny/pyvision_video", "qwen2_5_vl"), marks=pytest.mark.soak),
]


@pytest.fixture(scope="module", params=RECIPES, ids=lambda recipe: "-".join(recipe))
def run(request, tmp_path_factory):
    """A run of SFT and two RL steps; every RL group has a reward spread."""
    root, (name, family) = tmp_path_factory.mktemp("tools"), request.param
    overrides = [*SMALL, f"model.family={family}", write_alternating_reward(root)]
    if name != "tiny/pyvision_video":
        overrides.append("synthetic.image={objects: [2, 2], tasks_per_image: 6, grid_images: 0}")
    recipe = prepare(root, load_recipe(name, overrides))
    pipeline.run_sft(root / "run", recipe, on_step=lambda *_: None)
    pipeline.run_rl(root / "run", recipe, resume=True, on_step=lambda *_: None)
    return Run.open(root / "run")


def prepare(root, recipe):
    """Generate a dataset and a model for the recipe."""
    generate_dataset(root / "data", recipe.synthetic, seed=0)
    demonstrations = load_demonstrations(root / "data/train/demonstrations.jsonl")
    texts = {text for item in demonstrations for text in (item.task.question, *item.replies)}
    make_tiny_model(
        str(root / "model"),
        family=recipe.model.family,
        hidden_size=64,
        num_layers=2,
        vocabulary_text=sorted(texts),
        phrases=build_tokenizer_pieces(recipe.synthetic),
    )
    return pipeline.with_paths(recipe, folder=root / "run", model=root / "model", data=root / "data")


@pytest.mark.parametrize("grid_size", [5, 10])
def test_a_grid_image_is_trained_whole(tmp_path, grid_size):
    """Also if its demonstration is longer than a packed row."""
    overrides = (
        *SMALL,
        "synthetic.train=3",
        f"synthetic.image.grid_size={grid_size}",
        "sft={steps: 12, tokens_per_step: 400, auxiliary_warmup: 1, optim: {warmup_steps: 2}}",
    )
    recipe = prepare(tmp_path, load_recipe("tiny/pyvision_image", overrides))
    pipeline.run_sft(tmp_path / "run", recipe, on_step=lambda *_: None)
    rows = list(Run.open(tmp_path / "run").read_metrics("sft"))
    assert all(row["trained_tokens"] >= 4 * grid_size**2 for row in rows)  # an object is at least "red 7, "
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]


def count_prompt_tokens(run):
    """Return the visual tokens of a prompt: those of its image; a video is only in the interpreter."""
    if run.recipe.synthetic.media == "video":
        return 0
    return run.recipe.environment.settings["image_pixels"][1] // 16**2


def test_the_loss_decreases(run):
    losses = [row["loss"] for row in run.read_metrics("sft")]
    assert losses[-1] < 0.25 * losses[0]


def test_the_trainer_has_the_engines_logprobs(run):
    """Some episodes have images between their replies."""
    rows = list(run.read_metrics("rl"))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["calls/succeeded"] > 0
    assert rows[0]["visual_tokens"] > count_prompt_tokens(run)
    for row in rows:
        assert row["updates"] == 1
        assert row["engine_trainer_logprob_diff_max"] < 1e-4
        assert row["frac_errors"] == 0


def test_a_run_records_the_isolation_of_its_code(run):
    metadata = run.read_json("invocations.json")[-1]
    isolation = {name: text for name, text in metadata.items() if name.startswith("isolation of ")}
    runs_python = run.recipe.environment.name == "python"
    assert list(isolation) == (["isolation of python, best_effort"] if runs_python else [])
    assert all(isolation.values())


def test_an_evaluation_counts_visual_tokens(run):
    tasks = run.path.parent / "data/train/tasks.jsonl"
    prompt_tokens = count_prompt_tokens(run)
    settings = {"tasks": tasks, "weights": run.path / SFT_WEIGHTS, "on_progress": lambda *_: None}
    outcomes = evaluation.evaluate(run.path, run.recipe, name="train", **settings)
    for outcome in outcomes:
        images = [image for result in outcome.episode.results for image in result.images]
        # A tiny model's visual token covers 16 x 16 pixels; a box need not be square.
        tool_tokens = sum(image.width * image.height for image in images) // 16**2
        assert outcome.episode.usage.visual_tokens == prompt_tokens + tool_tokens
    assert any(outcome.episode.results for outcome in outcomes)
    without_tools = run.recipe.model_copy(
        update={"evaluation": run.recipe.evaluation.model_copy(update={"use_tools": False})}
    )
    outcomes = evaluation.evaluate(run.path, without_tools, name="train_no_tools", **settings)
    assert {outcome.episode.usage.visual_tokens for outcome in outcomes} == {prompt_tokens}
