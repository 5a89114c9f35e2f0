"""Writing weights layer by layer: bit for bit the same files, without a second full copy in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_models
import torch
from safetensors.torch import load_file

from saccade.config.schema import ModelConfig
from saccade.models import checkpoint_io
from saccade.models.checkpoint_files import check_weights
from saccade.models.tiny import make_tiny_model
from saccade.models.vlm import VisionLanguageModel

pytestmark = pytest.mark.slow  # creates and loads models


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "untied"])
def folder(request, tmp_path_factory) -> Path:
    path, untied = tmp_path_factory.mktemp(request.param) / "model", request.param == "untied"
    make_tiny_model(str(path), family="qwen3_vl" if untied else request.param, seed=3, tie_word_embeddings=not untied)
    return path


def load_vlm(folder) -> VisionLanguageModel:
    return VisionLanguageModel(ModelConfig(path=str(folder), num_threads=1))


def read_weights(folder) -> dict[str, torch.Tensor]:
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(len(shard) for shard in shards) == len({name for shard in shards for name in shard}), (
        "a weight is stored twice"
    )
    return {name: value for shard in shards for name, value in shard.items()}


def are_equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_small_model_is_the_file_that_transformers_writes(folder, tmp_path):
    vlm = load_vlm(folder)
    vlm.save(tmp_path / "ours")
    vlm.model.save_pretrained(tmp_path / "theirs")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 10**9])
def test_sharded_files_hold_the_same_weights(folder, tmp_path, shard_bytes):
    vlm = load_vlm(folder)
    vlm.save(tmp_path)
    checkpoint_io.write_weights(vlm.model, tmp_path, shard_bytes=1)  # files of an earlier model
    checkpoint_io.write_weights(vlm.model, tmp_path, shard_bytes=shard_bytes)
    assert are_equal(read_weights(tmp_path), read_weights(folder))
    names = [path.name for path in sorted(tmp_path.glob("*.safetensors"))]
    assert (len(names) == 1) == (shard_bytes == 10**9) == (not (tmp_path / "model.safetensors.index.json").exists())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    check_weights(tmp_path)
    reloaded, original = load_vlm(tmp_path).model.state_dict(), vlm.model.state_dict()
    assert are_equal(reloaded, original)
    if len(names) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == names
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in read_weights(tmp_path).values())


def test_a_cpu_copy_equals_the_files_and_is_independent_of_training(folder):
    vlm = load_vlm(folder)
    layers = checkpoint_io.copy_layers_to_cpu(vlm.model)
    with torch.no_grad():
        for parameter in vlm.trainable_parameters:
            parameter.add_(1.0)
    whole = {name: value for layer in layers for name, value in layer.items()}
    assert sum(map(len, layers)) == len(whole)
    assert are_equal(whole, read_weights(folder))


def test_layers_are_iterated_once_and_in_order(folder):
    vlm = load_vlm(folder)
    layers = [
        [checkpoint_io.parse_layer_name(name) for name in layer] for layer in checkpoint_io.iterate_layers(vlm.model)
    ]
    assert all(len(set(names)) == 1 for names in layers)
    text = [names[0] for names in layers if "language_model.layers" in names[0]]
    assert text == [f"model.language_model.layers.{number}" for number in range(len(vlm.language_model.layers))]


@pytest.fixture(scope="module")
def written_by_two_ranks(tmp_path_factory):
    """The folder of the models of `sharded_models.CASES`, and both ranks' reports by case."""
    folder = tmp_path_factory.mktemp("sharded")
    for name in sharded_models.CASES:
        make_tiny_model(str(folder / name / "model"), seed=3, tie_word_embeddings=name != "untied")
        (folder / name / "out").mkdir()
    return folder, dict(zip(sharded_models.CASES, zip(*run_two_ranks(folder), strict=True), strict=True))


@pytest.mark.parametrize("name", sharded_models.CASES)
def test_two_ranks_write_what_one_process_writes(written_by_two_ranks, tmp_path, name):
    """And hold a layer and a file at most, where all weights would be many times as much."""
    folder, reports = written_by_two_ranks
    model = sharded_models.load_model(str(folder / name / "model"), sharded_models.CASES[name])
    checkpoint_io.write_weights(model, tmp_path, shard_bytes=10**9)
    alone = load_file(tmp_path / "model.safetensors")
    written = read_weights(folder / name / "out")
    if sharded_models.CASES[name]:  # rounding of a partial product depends on its size
        assert written.keys() == alone.keys()
        assert all(torch.allclose(value, alone[name], atol=1e-5) for name, value in written.items())
    else:
        assert are_equal(written, alone)
    assert (folder / name / "out" / "model.safetensors.index.json").is_file()
    assert [report["copied"] for report in reports[name]] == [len(alone), 0]
    for report in reports[name]:
        assert report["now"] == 0
        layer = report["largest"] * (2 if sharded_models.CASES[name] else 1)  # the adapters' product, too
        assert report["max"] <= layer + sharded_models.SHARD_BYTES
        assert report["max"] < report["all"] / 2


def run_two_ranks(folder):
    """Run the two ranks; return the JSON reports of each, in the order of the cases."""
    source = str(Path(checkpoint_io.__file__).parents[2])
    running = [
        subprocess.Popen(
            [sys.executable, sharded_models.__file__, str(rank), str(folder / "store"), str(folder)],
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    return [[json.loads(line) for line in stdout.splitlines() if line.startswith("{")] for stdout, _ in outputs]
