"""Weights as files, a layer at a time: the same to the bit as written at once, and never whole but on disk."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import divided
import pytest
import torch
from safetensors.torch import load_file

from saccade.config import Model
from saccade.model import layerwise
from saccade.model.backbone import Backbone
from saccade.model.files import check_weights
from saccade.model.tiny import make_tiny

pytestmark = pytest.mark.slow  # models are made and opened


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "untied"])
def folder(request, tmp_path_factory) -> Path:
    path, untied = tmp_path_factory.mktemp(request.param) / "model", request.param == "untied"
    make_tiny(str(path), family="qwen3_vl" if untied else request.param, seed=3, tied=not untied)
    return path


def opened(folder) -> Backbone:
    return Backbone(Model(path=str(folder), threads=1))


def read(folder) -> dict[str, torch.Tensor]:
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(len(each) for each in found) == len({name for each in found for name in each}), "a weight is there twice"
    return {name: value for each in found for name, value in each.items()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_small_model_is_the_file_that_transformers_writes(folder, tmp_path):
    backbone = opened(folder)
    backbone.save(tmp_path / "ours")
    backbone.model.save_pretrained(tmp_path / "theirs")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.parametrize("file", [1, 100_000, 10**9])
def test_many_files_are_the_same_weights(folder, tmp_path, file):
    backbone = opened(folder)
    backbone.save(tmp_path)
    layerwise.write(backbone.model, tmp_path, file=1)  # what an earlier model left there
    layerwise.write(backbone.model, tmp_path, file=file)
    assert equal(read(tmp_path), read(folder))
    many = [path.name for path in sorted(tmp_path.glob("*.safetensors"))]
    assert (len(many) == 1) == (file == 10**9) == (not (tmp_path / "model.safetensors.index.json").exists())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    check_weights(tmp_path)
    again, ours = opened(tmp_path).model.state_dict(), backbone.model.state_dict()
    assert equal(again, ours)
    if len(many) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == many
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(tmp_path).values())


def test_a_copy_is_what_a_file_would_hold_and_stays_so(folder):
    backbone = opened(folder)
    layers = layerwise.copied(backbone.model)
    with torch.no_grad():
        for parameter in backbone.parameters:
            parameter.add_(1.0)
    whole = {name: value for layer in layers for name, value in layer.items()}
    assert sum(map(len, layers)) == len(whole)
    assert equal(whole, read(folder))


def test_a_layer_is_gathered_once_and_in_its_place(folder):
    backbone = opened(folder)
    layers = [[layerwise.layer_of(name) for name in layer.parts] for layer in layerwise.layers(backbone.model)]
    assert all(len(set(names)) == 1 for names in layers)
    text = [names[0] for names in layers if "language_model.layers" in names[0]]
    assert text == [f"model.language_model.layers.{number}" for number in range(len(backbone.text.layers))]


@pytest.mark.parametrize(("tied", "lora_rank"), [(True, 0), (False, 0), (True, 4)])
def test_two_processes_write_what_one_would(tmp_path, tied, lora_rank):
    """And hold a layer and a file at most, where all weights would be many times as much."""
    if lora_rank and not importlib.util.find_spec("peft"):
        pytest.skip("peft is missing: pip install peft")
    make_tiny(str(tmp_path / "model"), seed=3, tied=tied)
    told = together(tmp_path, lora_rank)
    layerwise.write(divided.opened(str(tmp_path / "model"), lora_rank), tmp_path, file=10**9)
    alone = load_file(tmp_path / "model.safetensors")
    found = read(tmp_path / "out")
    if lora_rank:  # a part of a product is rounded as the kernel for its size does
        assert found.keys() == alone.keys()
        assert all(torch.allclose(value, alone[name], atol=1e-5) for name, value in found.items())
    else:
        assert equal(found, alone)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert [each["copied"] for each in told] == [len(alone), 0]
    for each in told:
        assert each["now"] == 0
        layer = each["largest"] * (2 if lora_rank else 1)  # what is added to an adapted one as well
        assert each["most"] <= layer + divided.FILE
        assert each["most"] < each["all"] / 2


def together(tmp_path, lora_rank):
    """What the two processes say."""
    (tmp_path / "out").mkdir()
    source = str(Path(layerwise.__file__).parents[2])
    given = [*(str(tmp_path / name) for name in ("model", "out", "store")), str(lora_rank)]
    running = [
        subprocess.Popen(
            [sys.executable, divided.__file__, str(rank), *given],
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [each.communicate(timeout=240) for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], told
    return [json.loads(said.splitlines()[-1]) for said, _ in told]
