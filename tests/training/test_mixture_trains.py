"""A run that trains on videos and images in one mixture, also if it is resumed."""

import asyncio
import json
from pathlib import Path

import pytest
from commands import RL, good
from training_cases import write_alternating_reward

from saccade.config.load import load_recipe
from saccade.models.checkpoint_files import compute_checkpoint_digest
from saccade.runs import pipeline
from saccade.runs.pipeline import find_newest_weights
from saccade.training import rl
from saccade.types import MediaKind

SPLITS = ["synthetic.train=2", "synthetic.validation=1", "synthetic.test=1"]
# The learning rate is constant, because a decay depends on the number of steps, which a resumed run changes.
SMALL = [*RL, "sampling.max_tokens=8", "rl.filters.statuses=null", "rl.save_every=1", "rl.optim.schedule=constant"]


def generate_datasets():
    """Generate a dataset of videos and one of images; return their task files."""
    good("data", "synth", "videos", *SPLITS)
    good("data", "synth", "images", *SPLITS, "synthetic.media=image")
    return {name: str(Path.cwd() / name / "train" / "tasks.jsonl") for name in ("videos", "images")}


@pytest.mark.slow
def test_a_resumed_mixture_of_videos_and_images_equals_the_uninterrupted_one(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, reward = generate_datasets(), write_alternating_reward(tmp_path)
    mixture = f"data.train={json.dumps({files['videos']: 1, files['images']: 3})}"
    arguments = ["rl", "tiny/base", mixture, reward, *SMALL, "--model", tiny_folder]
    good(*arguments, "--out", "whole")
    good(*arguments, "rl.steps=2", "--out", "resumed")
    good(*arguments, "--out", "resumed", "--resume")
    videos_only = f"data.train={json.dumps(files['videos'])}"
    good("rl", "tiny/base", videos_only, reward, *SMALL, "--model", tiny_folder, "--out", "videos_only")
    digests = {
        name: compute_checkpoint_digest(find_newest_weights(tmp_path / name))
        for name in ("whole", "resumed", "videos_only")
    }
    assert digests["whole"] == digests["resumed"] != digests["videos_only"]


@pytest.mark.slow
def test_the_python_environment_trains_on_videos_and_images(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixture = f"data.train={json.dumps(dict.fromkeys(generate_datasets().values(), 1))}"
    recipe = load_recipe("tiny/pyvision_video", [mixture, write_alternating_reward(tmp_path), *SMALL])
    recipe = pipeline.with_paths(recipe, folder=tmp_path, model=Path(tiny_folder))
    components, rows, kinds = pipeline.load_training_components(recipe, Path(tiny_folder)), [], set()

    def record_kinds(step, groups):
        kinds.update(group.task.media[0].kind for group in groups)

    tasks = pipeline.load_training_tasks(tmp_path, recipe)
    asyncio.run(rl.train(components, tasks, folder=tmp_path / "rl", log_step=rows.append, on_groups=record_kinds))
    assert kinds == {MediaKind.VIDEO, MediaKind.IMAGE}
    assert all(row["updates"] == 1 for row in rows)
