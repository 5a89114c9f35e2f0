"""Published paths become local ones and come back; a stopped call goes on."""

import json
import os

import pytest
from commands import bad, good
from published_rows import EXAMPLES

from saccade.data import materialize as module
from saccade.data.archives import sha256
from saccade.data.cells import Cells
from saccade.data.materialize import SENTINELS, Paths, materialize
from saccade.data.native import iterate, write
from saccade.media.files import digest
from saccade.media.subtitles import subtitles_path
from saccade.types import Demo, Kind, Media, MediaKind, Task

NAMES = ["longvt_source/made/a b.mp4", "museg/charades/ü.mp4", "museg/et_instruct_164k/2.mp4", "selfqa/3.mp4"]


@pytest.fixture
def root(tmp_path):
    for name in NAMES[:2]:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(b"x")
    return tmp_path / "root"


def rows(count):
    """Rows of RL and of SFT, with paths in lists, in JSON and in JSON within JSON."""
    made = []
    for number in range(count):
        name = NAMES[number % 4]
        talk = json.dumps(
            [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": f"file://{name}"}}]}]
        )
        extra = json.dumps({"answer": f"{number}", "said": talk, "about": f"see {name}"}, ensure_ascii=bool(number % 2))
        made.append({"messages": talk, "videos": [{"video": name, "fps": 1.5}], "extra_info": extra, "n": number})
    return made


def texts(value):
    """Every text in a value, JSON opened."""
    if isinstance(value, str):
        yield from texts(json.loads(value)) if value[:1] in ("[", "{") else [value]
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)


def published(path, count=10):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(count)))
    return path


def test_every_path_gets_the_root_and_nothing_else_changes(tmp_path, root):
    source = published(tmp_path / "rows.jsonl")
    (done,) = materialize([source], tmp_path / "out", root)
    said = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    for row, old in zip(said, rows(10), strict=True):
        found, before = list(texts(row)), list(texts(old))
        for new, was in zip(found, before, strict=True):
            name = was.removeprefix("file://")
            assert new == (was.replace(name, f"{root}/{name}") if name in NAMES else was)
        assert (row["n"], row["videos"][0]["fps"]) == (old["n"], 1.5)
    assert done.rows == 10
    assert done.paths == {"longvt_source/made": 9, "museg/charades": 9, "museg/et_instruct_164k": 6, "selfqa": 6}
    assert done.missing == ("museg/et_instruct_164k/2.mp4", "selfqa/3.mp4")


def test_taking_the_root_away_gives_the_file_back(tmp_path, root):
    source = published(tmp_path / "rows.jsonl")
    materialize([source], tmp_path / "out", root)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() != source.read_bytes()
    materialize([tmp_path / "out" / "rows.jsonl"], tmp_path / "back", root, back=True)
    assert (tmp_path / "back" / "rows.jsonl").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("demos", [False, True], ids=["tasks", "demonstrations"])
def test_subtitles_are_looked_for_where_tasks_name_them(tmp_path, root, form, demos):
    """Their paths start at the video's folder, so that they stay as they are; a published path is changed like all."""
    said = ["../subtitles/1.srt", "a.srt", "longvt_source/made/b.srt", "", "../../../etc/passwd", "/elsewhere/c.srt"]
    tasks = [
        Task(
            id=str(at),
            question="?",
            media=(Media(path="museg/charades/p.png", kind=MediaKind.IMAGE), Media(path=NAMES[0])),
            kind=Kind.OPEN,
            gold="red",
            extras={"subtitles": name} if name else {"about": '"subtitles"'},
        )
        for at, name in enumerate(said)
    ]
    (root / "longvt_source" / "subtitles").mkdir()
    (root / "longvt_source" / "subtitles" / "1.srt").write_text("1")
    source = tmp_path / f"tasks.{form}"
    write(source, [Demo(task=each, frames=None, replies=("red",)) for each in tasks] if demos else tasks)
    (done,) = materialize([source], tmp_path / "out", root)
    assert {each for each in done.missing if each.endswith(".srt")} == {
        "longvt_source/made/a.srt",
        "longvt_source/made/b.srt",
    }
    assert done.media == ("longvt_source/made/a b.mp4", "longvt_source/subtitles/1.srt")
    assert done.paths == {"longvt_source/made": 8, "longvt_source/subtitles": 1, "museg/charades": 6}
    assert "made/a.srt" in (tmp_path / "out" / f"{source.name}.missing.txt").read_text()
    found = [each.task if demos else each for each in iterate(tmp_path / "out" / source.name, Demo if demos else Task)]
    assert [each.extras.get("subtitles") for each in found[:3]] == [*said[:2], f"{root}/{said[2]}"]
    assert os.path.isfile(subtitles_path(found[0]))
    # once it is unpacked the same call finds it
    (root / "longvt_source" / "made" / "a.srt").write_text("1")
    (again,) = materialize([source], tmp_path / "out", root)
    assert "longvt_source/made/a.srt" in again.media
    materialize([tmp_path / "out" / source.name], tmp_path / "back", root, back=True)
    kind = Demo if demos else Task
    assert [*iterate(tmp_path / "back" / source.name, kind)] == [*iterate(source, kind)]


@pytest.mark.slow
def test_parquet_comes_back_as_it_was(tmp_path, root, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[parquet]'")
    import pyarrow

    monkeypatch.setattr(module, "SHARD_ROWS", 300)
    table = pyarrow.Table.from_pylist(rows(1000))
    table = table.append_column("kind", pyarrow.array(["a", None] * 500).dictionary_encode())
    table = table.append_column("image", pyarrow.array([b"\x00selfqa/3.mp4"] * 1000))
    table = table.append_column("none", pyarrow.array([None] * 1000, pyarrow.list_(pyarrow.large_string())))
    table = table.replace_schema_metadata({"huggingface": "{}"})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    table = parquet.read_table(tmp_path / "rows.parquet")
    (done,) = materialize([tmp_path / "rows.parquet"], tmp_path / "out", root)
    local = parquet.read_table(tmp_path / "out" / "rows.parquet")
    assert done.rows == 1000
    assert local.schema.equals(table.schema, check_metadata=True)
    assert local["videos"][1].as_py()[0]["video"] == f"{root}/museg/charades/ü.mp4"
    assert local["image"] == table["image"]
    materialize([tmp_path / "out" / "rows.parquet"], tmp_path / "back", root, back=True)
    back = parquet.read_table(tmp_path / "back" / "rows.parquet")
    assert back.equals(table)
    assert back.schema.equals(table.schema, check_metadata=True)


@pytest.mark.parametrize("mark", [",", "\t"])
def test_a_table_comes_back_as_it_was(tmp_path, root, monkeypatch, mark):
    monkeypatch.setattr(module, "SHARD_ROWS", 3)
    many = '"selfqa/3.mp4|museg/charades/ü.mp4"'
    listed = '"[""selfqa/3.mp4"", {""video"": ""file://selfqa/3.mp4""}]"'
    cells = ["media", "question", "n"], [many, '"see selfqa/, \n""selfqa/3.mp4"" it says"', "1"], ["", '""', ""]
    cells = [*cells, [listed, '5" wide', "2"], ["selfqa/3.mp4", "a man, a plan" if mark != "," else "x", '"3"']] * 3
    text = "\r\n".join(mark.join(row) for row in cells)
    source = tmp_path / f"rows.{'csv' if mark == ',' else 'tsv'}"
    source.write_bytes(text.encode())
    (done,) = materialize([source], tmp_path / "out", root)
    assert done.rows == len(cells) - 1
    assert done.paths == {"selfqa": 12, "museg/charades": 3}
    local = (tmp_path / "out" / source.name).read_bytes().decode()
    assert local == text.replace("selfqa/3", f"{root}/selfqa/3").replace("museg/", f"{root}/museg/").replace(
        f'""{root}/selfqa/3.mp4"" it says', '""selfqa/3.mp4"" it says'
    )
    materialize([tmp_path / "out" / source.name], tmp_path / "back", root, back=True)
    assert (tmp_path / "back" / source.name).read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_cells_of_any_table_are_those_that_csv_reads():
    import csv
    import io

    from hypothesis import given
    from hypothesis import strategies as st

    @given(
        st.lists(st.lists(st.text('a",\n |é', max_size=5), min_size=1, max_size=4), min_size=1, max_size=5),
        st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    )
    def check(rows, quoting):
        held = io.StringIO(newline="")
        csv.writer(held, quoting=quoting).writerows(rows)
        text, seen = held.getvalue(), []
        cells = Cells(mark=",")
        split = list(cells.rows(text.splitlines(keepends=True)))
        assert "".join(split) == text
        back = [cells.changed(row, lambda cell: seen.append(cell) or cell) for row in split]
        assert "".join(back) == text
        # empty cells are none that could be changed, unless they are quoted
        read = [each for row in csv.reader(io.StringIO(text, newline="")) for each in row]
        assert [each for each in seen if each] == [each for each in read if each]

    check()


def test_published_examples_are_pointed_to_local_files(root):
    paths = Paths(root="/r", sentinels=SENTINELS)
    local = paths.changed(EXAMPLES["paravt_sft"])
    assert local["messages"][1]["content"][0]["video_url"]["url"] == "file:///r/selfqa/a.mp4"
    assert paths.changed(EXAMPLES["paravt_rl"])["videos"][0]["video"] == "/r/longvt_source/made/a.mp4"
    assert Paths(root="/r", sentinels=SENTINELS, back=True).changed(local) == EXAMPLES["paravt_sft"]


@pytest.mark.parametrize(
    "text",
    [
        "What is selfqa/ good for?",
        "/already/there/selfqa/3.mp4",
        "notselfqa/3.mp4",
        "selfqa",
        "a\nselfqa/3.mp4",
        "selfqa/../../etc/passwd",
    ],
)
def test_what_is_no_published_path_stays(text):
    assert Paths(root="/r", sentinels=SENTINELS).changed(text) == text
    line = json.dumps({"a": text, "b": [text]})
    assert Paths(root="/r", sentinels=SENTINELS).text(line) == line


def test_slashes_may_be_escaped():
    line = r'{"a": "file:\/\/selfqa\/\u00fc.mp4"}'
    paths = Paths(root="/r", sentinels=SENTINELS)
    assert json.loads(paths.text(line)) == {"a": "file:///r/selfqa/ü.mp4"}
    assert paths.missing == {"selfqa/ü.mp4"}
    assert Paths(root="/r", sentinels=SENTINELS, back=True).text(paths.text(line)) == line


def test_a_stopped_call_goes_on(tmp_path, root, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    source = published(tmp_path / "rows.jsonl", 95)
    materialize([source], tmp_path / "whole", root)
    for stop in (10, 50, 90, 95):

        def told(name, done, stop=stop):
            if done >= stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            materialize([source], tmp_path / "out", root, told=told)
        assert not (tmp_path / "out" / "rows.jsonl").exists()
    seen = []
    parts = tmp_path / "out" / ".parts" / "rows.jsonl"
    before = {part.name: part.stat().st_mtime_ns for part in parts.glob("*.jsonl")}
    assert len(before) == 10
    (done,) = materialize([source], tmp_path / "out", root, told=lambda name, rows: seen.append(rows))
    assert seen[-1] == 95
    assert done == materialize([source], tmp_path / "whole", root)[0]
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == (tmp_path / "whole" / "rows.jsonl").read_bytes()
    assert not parts.exists()


def test_a_changed_file_begins_anew(tmp_path, root, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    source = published(tmp_path / "rows.jsonl", 30)

    def told(name, done):
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        materialize([source], tmp_path / "out", root, told=told)
    published(source, 40)
    os.utime(source, (1, 1))
    assert materialize([source], tmp_path / "out", root)[0].rows == 40


def test_what_was_missing_is_looked_for_again(tmp_path, root):
    source = published(tmp_path / "rows.jsonl")
    words = ["data", "materialize", source, "--root", root, "--out", tmp_path / "out"]
    said = good(*words)
    assert "selfqa: 6 paths, 1 files missing" in said
    assert (tmp_path / "out" / "rows.jsonl.missing.txt").read_text().splitlines() == NAMES[2:]
    written = (tmp_path / "out" / "rows.jsonl").stat().st_mtime_ns
    (root / "selfqa").mkdir()
    (root / "selfqa" / "3.mp4").write_bytes(b"x")
    assert "selfqa: 6 paths, 0 files missing" in good(*words)
    assert (tmp_path / "out" / "rows.jsonl").stat().st_mtime_ns == written
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    entry = manifest["files"]["rows.jsonl"]
    assert entry["missing"] == {"museg/et_instruct_164k": 1}
    assert entry["digest"] == sha256(tmp_path / "out" / "rows.jsonl")
    assert entry["source_digest"] == sha256(source)


def test_bad_calls_are_one_sentence(tmp_path, root):
    source = published(tmp_path / "rows.jsonl")
    out = ["--out", tmp_path / "out"]
    assert "no such folder" in bad("data", "materialize", source, "--root", tmp_path / "none", *out)
    assert "no such file" in bad("data", "materialize", tmp_path / "x.jsonl", "--root", root, *out)
    assert "another folder" in bad("data", "materialize", source, "--root", root, "--out", tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert "end in .jsonl" in bad("data", "materialize", tmp_path / "a.txt", "--root", root, *out)
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a.csv").write_text("media,n\nselfqa/3.mp4,1\n")
    assert "would be two" in bad("data", "materialize", tmp_path / "a.csv", "--root", tmp_path / "a,b", *out)
    source.write_bytes(b'{"a": "\xff"}\n')
    assert "not UTF-8" in bad("data", "materialize", source, "--root", root, *out)
    assert "is a folder" in bad("data", "materialize", root, "--root", root, *out)


def test_a_file_that_was_cut_off_is_told_by_its_line(tmp_path, root, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    source = published(tmp_path / "rows.jsonl", 45)
    full = source.read_bytes()
    source.write_bytes(full[:-20])
    said = bad("data", "materialize", source, "--root", root, "--out", tmp_path / "out")
    assert f"{source}, line 45: not valid JSON; mend it or download it again" in said
    assert not (tmp_path / "out" / "rows.jsonl").exists()
    source.write_bytes(b"\xef\xbb\xbf" + full)  # a mark at the head is no fault
    good("data", "materialize", source, "--root", root, "--out", tmp_path / "out")


def test_parquet_goes_on_where_it_was(tmp_path, root, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is missing: pip install 'saccade[parquet]'")
    import pyarrow

    monkeypatch.setattr(module, "SHARD_ROWS", 100)
    parquet.write_table(pyarrow.Table.from_pylist(rows(730)), tmp_path / "rows.parquet", row_group_size=333)
    materialize([tmp_path / "rows.parquet"], tmp_path / "whole", root)
    for stop in (100, 400, 600, 730):

        def told(name, done, stop=stop):
            if done >= stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            materialize([tmp_path / "rows.parquet"], tmp_path / "out", root, told=told)
    materialize([tmp_path / "rows.parquet"], tmp_path / "out", root)
    out, whole = (parquet.read_table(tmp_path / name / "rows.parquet") for name in ("out", "whole"))
    assert out.equals(whole)
    assert out.num_rows == 730


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, root, monkeypatch):
    import errno

    monkeypatch.setattr(module, "SHARD_ROWS", 10)
    source = published(tmp_path / "rows.jsonl", 45)
    whole, left = module.whole, [7]

    def full(path):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(path)

    monkeypatch.setattr(module, "whole", full)
    words = ["data", "materialize", source, "--root", root, "--out", tmp_path / "out"]
    assert "no space left on device; free some space" in bad(*words)
    kept = list((tmp_path / "out" / ".parts" / "rows.jsonl").glob("*.note"))
    assert kept
    good(*words)
    materialize([source], tmp_path / "again", root)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == (tmp_path / "again" / "rows.jsonl").read_bytes()


def test_media_are_listed_with_their_digests(tmp_path, root):
    source = published(tmp_path / "rows.jsonl")
    words = ["data", "materialize", source, "--root", root, "--out", tmp_path / "out"]
    good(*words)
    path = tmp_path / "out" / "rows.jsonl.media.jsonl"
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert listed == [{"path": name, "bytes": 1} for name in sorted(NAMES[:2])]
    (root / "selfqa").mkdir()
    (root / "selfqa" / "3.mp4").write_bytes(b"y")
    good(*words, "--digest-media")
    listed = {row["path"]: row["digest"] for row in map(json.loads, path.read_text().splitlines())}
    assert sorted(listed) == sorted([*NAMES[:2], NAMES[3]])
    assert listed[NAMES[0]] == listed[NAMES[1]] == digest(str(root / NAMES[0])) != listed[NAMES[3]]
    (root / NAMES[0]).unlink()
    (root / NAMES[1]).write_bytes(b"")
    assert "longvt_source/made: 9 paths, 1 files missing" in good(*words, "--digest-media")
    listed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["path"] for row in listed if "digest" not in row] == [NAMES[1]]
