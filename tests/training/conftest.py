"""A world of three short clips and a model of two layers, made once; runs in them."""

import pytest
from training_cases import Home

from saccade.config import load_recipe
from saccade.data.rows import read_demos
from saccade.data.world import make_world, phrases
from saccade.model.tiny import make_tiny

SMALL = (
    "seed=5",
    "model.threads=1",
    "world={train: 3, validation: 1, test: 1, seconds: 16, events: [1, 2], pixels: 32, fps: 2, tasks_per_video: 4}",
    "sampling={max_tokens: 64, temperature: 0.8}",
    "gating.frames=[4, 8]",
    "sft={steps: 4, tokens_per_step: 400, per_scene: 2, save_every: 2, optim: {warmup: 3}}",
    "rl={steps: 4, prompts: 2, group: 4, save_every: 2, select: {oversample: 1}}",
    "rl.optim={lr: 1e-3, warmup: 3, schedule: constant, decay_from: 0}",
)


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Home:
    """The world, and a model that knows nothing."""
    root = tmp_path_factory.mktemp("training")
    recipe = load_recipe("tiny/para_grpo", SMALL)
    make_world(root / "world", recipe.world, seed=0)
    demos = [demo for demo in read_demos(root / "world/train/traces.jsonl") if demo.frames in (1, 4, 8)]
    said = {text for demo in demos for turn in (demo.replies, *demo.children) for text in turn}
    words = sorted(said | {demo.task.question for demo in demos})
    make_tiny(str(root / "model"), hidden=64, layers=2, vocabulary_text=words, phrases=phrases.PIECES)
    return Home(root=root, settings=SMALL, demos=tuple(demos))


@pytest.fixture(scope="session")
def schooled(home, tmp_path_factory):
    """The weights of the same model once it has learned to call: what RL needs to have children at all."""
    folder = tmp_path_factory.mktemp("schooled")
    calling = [demo for demo in home.demos if demo.main and demo.children][:6]
    stage = home.stage("sft={steps: 100, tokens_per_step: 300, save_every: 100, optim: {warmup: 5}}")
    home.sft(stage, folder, demos=calling)
    return folder / "step-000100"
