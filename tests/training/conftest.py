"""Fixtures: a dataset of three short videos and a model of two layers."""

import pytest
from training_cases import Workspace

from saccade.config.load import load_recipe
from saccade.data.dataset import load_demonstrations
from saccade.data.synthetic import generate_dataset, text_templates
from saccade.models.tiny import make_tiny_model

# No status is dropped: a test of the trainer must not depend on what a tiny model samples.
SMALL = (
    "seed=5",
    "model.num_threads=1",
    "synthetic={train: 3, validation: 1, test: 1, clip_seconds: 16, events: [1, 2], frame_size: 32, fps: 2}",
    "synthetic.tasks_per_video=4",
    "sampling={max_tokens: 64, temperature: 0.8}",
    "frame_budgets=[4, 8]",
    "sft={steps: 4, tokens_per_step: 400, demonstrations_per_prefix: 2, save_every: 2, optim: {warmup_steps: 3}}",
    "rl={steps: 4, prompts_per_step: 2, group_size: 4, save_every: 2}",
    "rl={selection: {oversample: 1}, filters: {statuses: {drop: []}}}",
    "rl.optim={lr: 1e-3, warmup_steps: 3, schedule: constant, decay_start: 0}",
)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory) -> Workspace:
    """The dataset, and a model with random weights."""
    root = tmp_path_factory.mktemp("training")
    recipe = load_recipe("tiny/para_grpo", SMALL)
    generate_dataset(root / "data", recipe.synthetic, seed=0)
    demonstrations = [
        demonstration
        for demonstration in load_demonstrations(root / "data/train/demonstrations.jsonl")
        if demonstration.frame_budget in (1, 4, 8)
    ]
    replies = {
        text
        for demonstration in demonstrations
        for turn in (demonstration.replies, *demonstration.children)
        for text in turn
    }
    make_tiny_model(
        str(root / "model"),
        hidden_size=64,
        num_layers=2,
        vocabulary_text=sorted(replies | {demonstration.task.question for demonstration in demonstrations}),
        phrases=text_templates.TOKENIZER_PIECES,
    )
    return Workspace(root=root, settings=SMALL, demonstrations=tuple(demonstrations))


@pytest.fixture(scope="session")
def trained_weights(workspace, tmp_path_factory):
    """The weights of the same model after SFT on tool calls, so that its episodes have children."""
    folder = tmp_path_factory.mktemp("trained")
    with_calls = [
        demonstration
        for demonstration in workspace.demonstrations
        if not demonstration.is_auxiliary and demonstration.children
    ][:6]
    components = workspace.load_components(
        "sft={steps: 100, tokens_per_step: 300, save_every: 100, optim: {warmup_steps: 5}}"
    )
    workspace.run_sft(components, folder, demonstrations=with_calls)
    return folder / "step-000100"
