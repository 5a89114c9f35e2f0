"""Data sets from a hub: fetched once, pinned to a commit, there without a network; what goes wrong is one sentence."""

import json
import os
import sys

import pytest
from archive_cases import zipped
from commands import bad, good
from hub_server import hub

from saccade.data.hub import Hub
from saccade.data.rows import read_tasks
from saccade.errors import ConfigError, DataError, RunError

ROW = {"media": "a.mp4", "question": "Which colour?", "answer": "red"}


@pytest.fixture
def site():
    with hub() as found:
        found.put("made/films", {"data/test-0.jsonl": json.dumps(ROW), "old/x.jsonl": "{}", "v/1.mp4": b"x" * 9})
        yield found


def at(site, tmp_path):
    return Hub(endpoint=site.url, home=str(tmp_path / "home"))


def test_what_fits_is_fetched_once(site, tmp_path):
    folder = at(site, tmp_path).copy("made/films", ["*.parquet", "data/test-*.jsonl", "*.jsonl"])
    assert folder == tmp_path / "home" / "made" / "films"
    assert json.loads((folder / "data" / "test-0.jsonl").read_text()) == ROW
    assert not (folder / "old").exists()
    asked = len(site.asked)
    assert at(site, tmp_path).copy("made/films", ["data/test-*.jsonl"]) == folder
    assert len(site.asked) == asked


def test_a_folder_stays_at_the_commit_it_began_with(site, tmp_path):
    first = site.put("made/two", {"a.jsonl": "1", "b.jsonl": "1"})
    folder = at(site, tmp_path).copy("made/two", ["a.jsonl"])
    second = site.put("made/two", {"a.jsonl": "2", "b.jsonl": "2"})
    at(site, tmp_path).copy("made/two", ["b.jsonl"])
    assert [(folder / name).read_text() for name in ("a.jsonl", "b.jsonl")] == ["1", "1"]
    assert json.loads((folder / "hub.json").read_text())["commit"] == first
    newer = at(site, tmp_path).copy("made/two", ["b.jsonl"], revision=second)
    assert newer != folder
    assert (newer / "b.jsonl").read_text() == "2"


def test_what_was_fetched_is_there_without_a_network(site, tmp_path):
    site.put("made/two", {"a.jsonl": "1", "b.jsonl": "2"})
    folder = at(site, tmp_path).copy("made/two", ["a.jsonl"])
    dead = Hub(endpoint="http://127.0.0.1:9", home=str(tmp_path / "home"))
    assert dead.copy("made/two", ["a.jsonl"]) == folder
    with pytest.raises(DataError, match=r"can't be fetched from http.*; check the network, or copy"):
        dead.copy("made/films", ["*.jsonl"])


def test_a_half_fetched_set_goes_on(site, tmp_path):
    site.put("made/two", {"a.jsonl": "1", "b.jsonl": "2"})
    site.broken.add("made/two/b.jsonl")
    with pytest.raises(DataError, match=r"lists b.jsonl of the data set made/two but doesn't have it; try again later"):
        at(site, tmp_path).copy("made/two", ["*.jsonl"])
    site.broken.clear()
    site.asked.clear()
    folder = at(site, tmp_path).copy("made/two", ["*.jsonl"])
    assert (folder / "b.jsonl").read_text() == "2"
    assert not any("a.jsonl" in each or "/api/" in each for each in site.asked)


@pytest.mark.parametrize(
    ("name", "revision", "sentence"),
    [
        ("made/none", "main", "has no data set made/none, or it is private; check the name, or log in"),
        ("made/films", "v9", "has no such revision"),
        ("made/gated", "main", "is for those who agreed to its terms; accept its terms at http.*/datasets/made/gated"),
    ],
)
def test_what_the_hub_refuses_is_told(name, revision, sentence, site, tmp_path):
    site.broken.add("made/gated")
    with pytest.raises(DataError, match=sentence):
        at(site, tmp_path).copy(name, ["*.jsonl"], revision=revision)


def test_what_is_not_there_is_told(site, tmp_path):
    there = at(site, tmp_path)
    with pytest.raises(DataError, match=r"the data set made/films at http.* has no file like \*.csv"):
        there.copy("made/films", ["*.csv"])
    with pytest.raises(DataError, match=r"has no file data/none.jsonl"):
        there.file("hub:made/films/data/none.jsonl")
    with pytest.raises(ConfigError, match="a file on the hub is hub:owner/name/path"):
        there.file("hub:films.jsonl")
    folder = there.copy("made/films", ["data/*.jsonl"])
    (folder / "hub.json").write_text("{")
    with pytest.raises(DataError, match=r"hub.json can't be read; delete"):
        there.copy("made/films", ["data/*.jsonl"])


def test_a_listing_that_leads_outside_is_refused(site, tmp_path):
    site.put("made/evil", {"../../x.jsonl": "1"})
    with pytest.raises(DataError, match=r"the listing of made/evil at .* can't be used"):
        at(site, tmp_path).copy("made/evil", ["*.jsonl"])


def test_media_are_fetched_where_they_lie_by_themselves(site, tmp_path):
    there = at(site, tmp_path)
    folder = there.copy("made/films", ["data/*.jsonl"])
    there.add(folder, [str(folder / "v" / "1.mp4")] * 2)
    assert (folder / "v" / "1.mp4").read_bytes() == b"x" * 9
    there.add(folder, [str(folder / "v" / "1.mp4")])
    with pytest.raises(DataError, match=r"lacks 1 files, first v/2.mp4, which made/films holds neither by themselves"):
        there.add(folder, [str(folder / "v" / "2.mp4")])
    with pytest.raises(DataError, match=r"a row names .*x.mp4, which lies outside of it; mend the row"):
        there.add(folder, [str(folder / "v" / ".." / ".." / "x.mp4")])


def test_media_come_out_of_archives_and_only_those_are_fetched_that_are_needed(site, tmp_path):
    films, more = zipped({"data/1.mp4": b"one", "data/2.mp4": b"two"}), zipped({"data/3.mp4": b"three"})
    site.put("made/packed", {"a.jsonl": "1", "films_1.zip": films, "films_2.zip": more, "v.zip.part.aa": b"x"})
    there = at(site, tmp_path)
    folder = there.copy("made/packed", ["a.jsonl"])
    there.add(folder, [str(folder / "data" / "2.mp4")])
    assert [(path.name, path.read_bytes()) for path in (folder / "data").iterdir()] == [("2.mp4", b"two")]
    assert not (folder / "films_2.zip").exists()
    site.asked.clear()
    there.add(folder, [str(folder / "data" / "1.mp4")])  # from the archive that is there
    assert not site.asked
    (folder / "films_1.zip").unlink()  # whoever needs the space may
    there.add(folder, [str(folder / "data" / name) for name in ("1.mp4", "2.mp4", "3.mp4")])
    assert (folder / "data" / "3.mp4").read_bytes() == b"three"


def test_a_damaged_archive_is_told_and_fetched_again(site, tmp_path):
    site.digests["films.zip"] = "0" * 64
    site.put("made/packed", {"a.jsonl": "1", "films.zip": zipped({"data/1.mp4": b"one"})})
    there = at(site, tmp_path)
    folder = there.copy("made/packed", ["a.jsonl"])
    with pytest.raises(DataError, match=r"films.zip of made/packed came damaged .*; run the same command again"):
        there.add(folder, [str(folder / "data" / "1.mp4")])
    assert not (folder / "films.zip").exists()
    assert not (folder / "data").exists()


def test_what_does_not_fit_is_told_before_it_is_fetched(site, tmp_path):
    site.sizes["films.zip"] = 10**18
    site.put("made/packed", {"a.jsonl": "1", "films.zip": zipped({"data/1.mp4": b"one"})})
    there = at(site, tmp_path)
    folder = there.copy("made/packed", ["a.jsonl"])
    with pytest.raises(
        DataError, match=r"fetching films.zip of made/packed needs 9.*GiB and the disk of .* has .*; fr"
    ):
        there.add(folder, [str(folder / "data" / "1.mp4")])
    assert not any("films.zip" in each for each in site.asked)


def test_without_the_package_one_sentence_says_how_to_get_it(site, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"needs huggingface_hub; install it with: pip install 'saccade\[hub\]'"):
        at(site, tmp_path).copy("made/films", ["*.jsonl"])


def test_staying_offline_is_told(site, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="is told to stay offline; unset HF_HUB_OFFLINE, or copy"):
        at(site, tmp_path).copy("made/films", ["*.jsonl"])


def test_a_folder_that_cannot_be_written_is_told(site, tmp_path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(RunError, match="can't be written: "):
        at(site, tmp_path).copy("made/films", ["*.jsonl"])


def test_a_file_on_the_hub_is_imported(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.mp4").write_bytes(b"x")
    words = ["data", "import", "plain", "hub:made/films/data/test-0.jsonl", "--root", tmp_path]
    words += ["--hub", site.url]
    good(*words, "--out", tmp_path / "tasks.jsonl")
    (task,) = read_tasks(tmp_path / "tasks.jsonl")
    assert os.path.samefile(task.media[0].path, tmp_path / "a.mp4")
    words[3] = "hub:made/films/none.jsonl"
    assert "has no file none.jsonl" in bad(*words, "--out", tmp_path / "tasks.jsonl")
