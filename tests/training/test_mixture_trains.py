"""A run that learns from films and pictures at once, stopped and gone on with."""

import json

import pytest
from commands import RL, good

from saccade.model.digest import weights_digest
from saccade.stages import newest

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
