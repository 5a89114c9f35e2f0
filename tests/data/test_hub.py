"""Datasets of the hub are downloaded once, pinned to a commit, and available offline; failures are typed errors."""

import json
import os
import sys
from pathlib import Path

import pytest
from archive_cases import build_zip
from commands import fail, good
from error_cases import raises
from hub_server import serve_hub
from huggingface_hub import errors

from saccade.config.load import load_recipe
from saccade.data.dataset import load_tasks
from saccade.data.hub import HubClient
from saccade.errors import ConfigError, DataError, ModelError, RunError
from saccade.runs import pipeline

ROW = {"media": "a.mp4", "question": "Which colour?", "answer": "red"}


@pytest.fixture
def hub():
    with serve_hub() as hub:
        hub.add_dataset("made/videos", {"data/test-0.jsonl": json.dumps(ROW), "old/x.jsonl": "{}", "v/1.mp4": b"x" * 9})
        yield hub


@pytest.fixture
def model_hub(hub, tmp_path, monkeypatch):
    """A hub with a model, an empty cache, and a working directory without a folder of the owner's name."""
    hub.add_dataset("made/tiny-vl", {"config.json": "{}", "model.safetensors": "x", "extra/demo.mp4": b"x"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("saccade.data.hub.DEFAULT_ENDPOINT", hub.url)
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_model_is_downloaded_once_without_other_files(model_hub):
    folder = pipeline.resolve_checkpoint(Path("made/tiny-vl"))
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "model.safetensors"]
    assert pipeline.resolve_checkpoint(Path("made/tiny-vl"), downloads=False) == folder
    recipe = pipeline.with_paths(load_recipe("tiny/base"), folder=Path("run"), model=Path("made/tiny-vl"))
    assert recipe.model.path == str(folder.resolve())


def test_a_model_that_is_nowhere_is_an_error(model_hub, tmp_path):
    for name, downloads in (("made/tiny-vl", False), ("made/none", True)):
        num_requests = len(model_hub.requests)
        with raises(ModelError, key=name):
            pipeline.resolve_checkpoint(Path(name), downloads=downloads)
        assert (len(model_hub.requests) > num_requests) is downloads
    (tmp_path / "runs").mkdir()
    assert pipeline.resolve_checkpoint(Path("runs/none")) == Path("runs/none")  # a path: its folder exists


def test_a_model_needs_huggingface_hub(model_hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(ConfigError, key="huggingface_hub", value="made/tiny-vl"):
        pipeline.resolve_checkpoint(Path("made/tiny-vl"))


def make_client(hub, tmp_path):
    return HubClient(endpoint=hub.url, cache_dir=str(tmp_path / "home"))


def test_matching_files_are_downloaded_once(hub, tmp_path):
    folder = make_client(hub, tmp_path).download("made/videos", ["*.parquet", "data/test-*.jsonl", "*.jsonl"])
    assert folder == tmp_path / "home" / "made" / "videos"
    assert json.loads((folder / "data" / "test-0.jsonl").read_text()) == ROW
    assert not (folder / "old").exists()
    num_requests = len(hub.requests)
    assert make_client(hub, tmp_path).download("made/videos", ["data/test-*.jsonl"]) == folder
    assert len(hub.requests) == num_requests


def test_folder_keeps_its_first_commit(hub, tmp_path):
    first = hub.add_dataset("made/two", {"a.jsonl": "1", "b.jsonl": "1"})
    folder = make_client(hub, tmp_path).download("made/two", ["a.jsonl"])
    second = hub.add_dataset("made/two", {"a.jsonl": "2", "b.jsonl": "2"})
    make_client(hub, tmp_path).download("made/two", ["b.jsonl"])
    assert [(folder / name).read_text() for name in ("a.jsonl", "b.jsonl")] == ["1", "1"]
    assert json.loads((folder / "hub.json").read_text())["commit"] == first
    newer = make_client(hub, tmp_path).download("made/two", ["b.jsonl"], revision=second)
    assert newer != folder
    assert (newer / "b.jsonl").read_text() == "2"


def test_downloaded_files_need_no_network(hub, tmp_path):
    hub.add_dataset("made/two", {"a.jsonl": "1", "b.jsonl": "2"})
    folder = make_client(hub, tmp_path).download("made/two", ["a.jsonl"])
    offline = HubClient(endpoint="http://127.0.0.1:9", cache_dir=str(tmp_path / "home"))
    assert offline.download("made/two", ["a.jsonl"]) == folder
    with raises(DataError, key="made/videos"):
        offline.download("made/videos", ["*.jsonl"])


def test_interrupted_download_resumes(hub, tmp_path):
    hub.add_dataset("made/two", {"a.jsonl": "1", "b.jsonl": "2"})
    hub.broken.add("made/two/b.jsonl")
    with raises(DataError, key="made/two"):
        make_client(hub, tmp_path).download("made/two", ["*.jsonl"])
    hub.broken.clear()
    hub.requests.clear()
    folder = make_client(hub, tmp_path).download("made/two", ["*.jsonl"])
    assert (folder / "b.jsonl").read_text() == "2"
    assert not any("a.jsonl" in request or "/api/" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("name", "revision", "cause", "words"),
    [
        ("made/none", "main", errors.RepositoryNotFoundError, ("made/none",)),
        ("made/videos", "v9", errors.RevisionNotFoundError, ("made/videos",)),
        ("made/gated", "main", errors.GatedRepoError, ("/datasets/made/gated",)),
    ],
)
def test_error_responses_are_explained(name, revision, cause, words, hub, tmp_path):
    hub.broken.add("made/gated")
    with raises(DataError, key=name) as caught:
        make_client(hub, tmp_path).download(name, ["*.jsonl"], revision=revision)
    assert type(caught.value.__cause__) is cause
    assert all(word in str(caught.value) for word in words)


def test_missing_files_are_errors(hub, tmp_path):
    client = make_client(hub, tmp_path)
    with raises(DataError, key="made/videos", value=("*.csv",)):
        client.download("made/videos", ["*.csv"])
    with raises(DataError, key="data/none.jsonl"):
        client.download_file("hub:made/videos/data/none.jsonl")
    with raises(ConfigError, key="hub:videos.jsonl"):
        client.download_file("hub:videos.jsonl")
    folder = client.download("made/videos", ["data/*.jsonl"])
    (folder / "hub.json").write_text("{")
    with raises(DataError):
        client.download("made/videos", ["data/*.jsonl"])


def test_listing_with_a_path_outside_is_an_error(hub, tmp_path):
    hub.add_dataset("made/evil", {"../../x.jsonl": "1"})
    with raises(DataError, key="made/evil", value="../../x.jsonl"):
        make_client(hub, tmp_path).download("made/evil", ["*.jsonl"])


def test_download_missing_files(hub, tmp_path):
    client = make_client(hub, tmp_path)
    folder = client.download("made/videos", ["data/*.jsonl"])
    client.download_missing(folder, [str(folder / "v" / "1.mp4")] * 2)
    assert (folder / "v" / "1.mp4").read_bytes() == b"x" * 9
    client.download_missing(folder, [str(folder / "v" / "1.mp4")])
    with raises(DataError, key=str(folder), value="v/2.mp4"):
        client.download_missing(folder, [str(folder / "v" / "2.mp4")])
    outside = str(folder / "v" / ".." / ".." / "x.mp4")
    with raises(DataError, key=outside):
        client.download_missing(folder, [outside])


def test_download_missing_extracts_from_the_needed_archives_only(hub, tmp_path):
    first, second = build_zip({"data/1.mp4": b"one", "data/2.mp4": b"two"}), build_zip({"data/3.mp4": b"three"})
    hub.add_dataset(
        "made/packed", {"a.jsonl": "1", "videos_1.zip": first, "videos_2.zip": second, "z.zip.part.aa": b"x"}
    )
    client = make_client(hub, tmp_path)
    folder = client.download("made/packed", ["a.jsonl"])
    client.download_missing(folder, [str(folder / "data" / "2.mp4")])
    assert [(path.name, path.read_bytes()) for path in (folder / "data").iterdir()] == [("2.mp4", b"two")]
    assert not (folder / "videos_2.zip").exists()
    hub.requests.clear()
    client.download_missing(folder, [str(folder / "data" / "1.mp4")])  # from the archive that is already downloaded
    assert not hub.requests
    (folder / "videos_1.zip").unlink()  # users may delete it to free space
    client.download_missing(folder, [str(folder / "data" / name) for name in ("1.mp4", "2.mp4", "3.mp4")])
    assert (folder / "data" / "3.mp4").read_bytes() == b"three"


def test_damaged_archive_is_deleted(hub, tmp_path):
    hub.digests["videos.zip"] = "0" * 64
    hub.add_dataset("made/packed", {"a.jsonl": "1", "videos.zip": build_zip({"data/1.mp4": b"one"})})
    client = make_client(hub, tmp_path)
    folder = client.download("made/packed", ["a.jsonl"])
    with raises(DataError, key="videos.zip"):
        client.download_missing(folder, [str(folder / "data" / "1.mp4")])
    assert not (folder / "videos.zip").exists()
    assert not (folder / "data").exists()


def test_disk_space_is_checked_before_the_download(hub, tmp_path):
    hub.sizes["videos.zip"] = 10**18
    hub.add_dataset("made/packed", {"a.jsonl": "1", "videos.zip": build_zip({"data/1.mp4": b"one"})})
    client = make_client(hub, tmp_path)
    folder = client.download("made/packed", ["a.jsonl"])
    with raises(DataError, key=str(folder), value=10**18):
        client.download_missing(folder, [str(folder / "data" / "1.mp4")])
    assert not any("videos.zip" in request for request in hub.requests)


def test_missing_package_is_a_config_error(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(ConfigError, key="huggingface_hub"):
        make_client(hub, tmp_path).download("made/videos", ["*.jsonl"])


def test_offline_mode_is_explained(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with raises(DataError, key="made/videos"):
        make_client(hub, tmp_path).download("made/videos", ["*.jsonl"])


def test_unwritable_folder_is_an_error(hub, tmp_path):
    (tmp_path / "home").write_text("a file")
    with raises(RunError):
        make_client(hub, tmp_path).download("made/videos", ["*.jsonl"])


def test_import_a_file_of_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.mp4").write_bytes(b"x")
    words = ["data", "import", "plain", "hub:made/videos/data/test-0.jsonl", "--root", tmp_path]
    words += ["--hub", hub.url]
    good(*words, "--out", tmp_path / "tasks.jsonl")
    (task,) = load_tasks(tmp_path / "tasks.jsonl")
    assert os.path.samefile(task.media[0].path, tmp_path / "a.mp4")
    words[3] = "hub:made/videos/none.jsonl"
    fail(DataError, *words, "--out", tmp_path / "tasks.jsonl", key="none.jsonl")
