"""A run that learns from films and pictures at once, stopped and gone on with."""

import asyncio
import json
from pathlib import Path

import pytest
from commands import RL, good

from saccade import stages
from saccade.config import load_recipe
from saccade.model.digest import weights_digest
from saccade.stages import newest
from saccade.training import rl
from saccade.types import MediaKind

WORLD = ["world.train=2", "world.validation=1", "world.test=1"]
# A constant rate: one that falls would depend on how many steps there are to be.
SMALL = [*RL, "sampling.max_tokens=8", "rl.select.drop_ends=[]", "rl.save_every=1", "rl.optim.schedule=constant"]
# an untrained model is never right: so that there is something to learn, replies are worth their length
LENGTH = "def length(episode, task):\n    return float(len(episode.turns[0].reply.text) % 5)\n"


@pytest.mark.slow
def test_films_and_pictures_in_one_run(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good("data", "world", "films", *WORLD)
    good("data", "world", "pictures", *WORLD, "world.media=image")
    (tmp_path / "length.py").write_text(LENGTH)
    reward = f"rewards={json.dumps({str(tmp_path / 'length.py'): {'weight': 1.0}})}"
    files = {name: str(tmp_path / name / "train" / "tasks.jsonl") for name in ("films", "pictures")}
    mixed = f"data.train={json.dumps({files['films']: 1, files['pictures']: 3})}"
    words = ["train", "tiny/base", mixed, reward, *SMALL, "--model", tiny_folder]
    good(*words, "--out", "whole")
    good(*words, "rl.steps=2", "--out", "parted")
    good(*words, "--out", "parted", "--resume")
    one = str(tmp_path / "films" / "train" / "tasks.jsonl")
    good("train", "tiny/base", f"data.train={one}", reward, *SMALL, "--model", tiny_folder, "--out", "films_alone")
    weights = {name: weights_digest(newest(tmp_path / name)) for name in ("whole", "parted", "films_alone")}
    assert weights["whole"] == weights["parted"] != weights["films_alone"]


@pytest.mark.slow
def test_code_learns_from_films_and_pictures(tmp_path, tiny_folder, monkeypatch):
    """The same recipe, the same loop: what a task's media are is not its business."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length.py").write_text(LENGTH)
    reward = f"rewards={json.dumps({str(tmp_path / 'length.py'): {'weight': 1.0}})}"
    files = {}
    for name, media in (("films", "video"), ("pictures", "image")):
        good("data", "world", name, *WORLD, f"world.media={media}")
        files[str(tmp_path / name / "train" / "tasks.jsonl")] = 1
    mixed = f"data.train={json.dumps(files)}"
    recipe = load_recipe("tiny/pyvision_video", [mixed, reward, *SMALL])
    recipe = stages.with_paths(recipe, folder=tmp_path, model=Path(tiny_folder))
    stage, rows, kinds = stages.load(recipe, Path(tiny_folder)), [], set()

    def seen(number, groups):
        kinds.update(group.task.media[0].kind for group in groups)

    tasks = stages.training_tasks(tmp_path, recipe)
    asyncio.run(rl.train(stage, tasks, folder=tmp_path / "rl", log=rows.append, seen=seen))
    assert kinds == {MediaKind.VIDEO, MediaKind.IMAGE}
    assert any(row["updates"] for row in rows)
